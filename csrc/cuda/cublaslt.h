// cuBLASLt: the functions that we call, looked up at first use, and owners of its descriptors.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <string>
#include <string_view>

#include "cuda/dynlib.h"
#include "cuda/launch.h"

namespace te::cuda {

struct CublasLt {
  CublasLt();

  DynamicLibrary library;

  decltype(&cublasLtGetVersion) version = library.find("cublasLtGetVersion");
  decltype(&cublasLtGetStatusString) status_text = library.find("cublasLtGetStatusString");
  decltype(&cublasLtCreate) create = library.find("cublasLtCreate");
  decltype(&cublasLtMatmul) matmul = library.find("cublasLtMatmul");

  decltype(&cublasLtMatmulDescCreate) desc_create = library.find("cublasLtMatmulDescCreate");
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = library.find("cublasLtMatmulDescDestroy");
  decltype(&cublasLtMatmulDescSetAttribute) desc_set =
      library.find("cublasLtMatmulDescSetAttribute");

  decltype(&cublasLtMatrixLayoutCreate) layout_create = library.find("cublasLtMatrixLayoutCreate");
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy =
      library.find("cublasLtMatrixLayoutDestroy");

  decltype(&cublasLtMatmulPreferenceCreate) preference_create =
      library.find("cublasLtMatmulPreferenceCreate");
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy =
      library.find("cublasLtMatmulPreferenceDestroy");
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set =
      library.find("cublasLtMatmulPreferenceSetAttribute");

  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic =
      library.find("cublasLtMatmulAlgoGetHeuristic");
  decltype(&cublasLtMatmulAlgoInit) algo_init = library.find("cublasLtMatmulAlgoInit");
  decltype(&cublasLtMatmulAlgoCheck) algo_check = library.find("cublasLtMatmulAlgoCheck");
  decltype(&cublasLtMatmulAlgoCapGetAttribute) algo_capability =
      library.find("cublasLtMatmulAlgoCapGetAttribute");
  decltype(&cublasLtMatmulAlgoConfigSetAttribute) algo_set =
      library.find("cublasLtMatmulAlgoConfigSetAttribute");
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_get =
      library.find("cublasLtMatmulAlgoConfigGetAttribute");
};

// Opens the library on the first call; a failure is thrown again on the next.
const CublasLt& cublaslt();

// The handle of `device`, which must be the current one; created once.
cublasLtHandle_t cublaslt_handle(Device device);

// Throws Kind::Runtime: `[gemm] cuBLASLt <version>: <status> in <call>`.
void check(cublasStatus_t status, std::string_view op, std::string_view call);

cudaDataType_t cuda_type(DType t);

struct DestroyDesc {
  void operator()(cublasLtMatmulDesc_t desc) const { cublaslt().desc_destroy(desc); }
};
struct DestroyLayout {
  void operator()(cublasLtMatrixLayout_t layout) const { cublaslt().layout_destroy(layout); }
};
struct DestroyPreference {
  void operator()(cublasLtMatmulPreference_t p) const { cublaslt().preference_destroy(p); }
};

template <class Pointer, class Destroy>
using CublasOwner = std::unique_ptr<std::remove_pointer_t<Pointer>, Destroy>;

// What to multiply: transposes, epilogue, and the pointers that are not matrices.
class MatmulDesc {
 public:
  explicit MatmulDesc(cublasComputeType_t compute);

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublaslt().desc_set(desc_.get(), attribute, &value, sizeof value), "gemm",
          "cublasLtMatmulDescSetAttribute");
  }
  cublasLtMatmulDesc_t get() const { return desc_.get(); }

 private:
  CublasOwner<cublasLtMatmulDesc_t, DestroyDesc> desc_;
};

// A packed column-major matrix.
class MatrixLayout {
 public:
  MatrixLayout(DType type, int64_t rows, int64_t cols);
  cublasLtMatrixLayout_t get() const { return layout_.get(); }

 private:
  CublasOwner<cublasLtMatrixLayout_t, DestroyLayout> layout_;
};

// The alignment of addresses, as powers of two.
struct MatmulAlignment {
  int32_t operand_bytes = 0;
  int32_t result_bytes = 0;  // of the result, and of what is accessed with it: bias, aux

  auto operator<=>(const MatmulAlignment&) const = default;
};

// What the heuristic may assume: the size of the workspace, alignments, and how split-K sums are
// reduced.
class MatmulPreference {
 public:
  MatmulPreference(int64_t workspace_bytes, MatmulAlignment alignment);
  cublasLtMatmulPreference_t get() const { return preference_.get(); }

 private:
  CublasOwner<cublasLtMatmulPreference_t, DestroyPreference> preference_;
};

}  // namespace te::cuda
