#include "cuda/cublaslt.h"

#include <array>
#include <mutex>

namespace te::cuda {
namespace {

constexpr const char* kOp = "gemm";

}  // namespace

CublasLt::CublasLt() : library("CUBLASLT", concat("libcublasLt.so.", CUBLAS_VER_MAJOR)) {
  constexpr size_t kVersionsPerMajor = 10000;
  require(version() / kVersionsPerMajor == CUBLAS_VER_MAJOR, Kind::Runtime, kOp,
          "expected cuBLASLt of major version ", CUBLAS_VER_MAJOR, ", got version ", version());
}

const CublasLt& cublaslt() {
  static const auto* library = new CublasLt;  // never destroyed: plans live as long as the process
  return *library;
}

cublasLtHandle_t cublaslt_handle(Device device) {
  static std::mutex mutex;
  static std::array<cublasLtHandle_t, kMaxDevices> handles{};
  const std::scoped_lock lock(mutex);
  cublasLtHandle_t& handle = handles.at(static_cast<size_t>(device.index));
  if (handle == nullptr) check(cublaslt().create(&handle), kOp, "cublasLtCreate");
  return handle;
}

void check(cublasStatus_t status, std::string_view op, std::string_view call) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  fail(Kind::Runtime, op, "cuBLASLt ", cublaslt().version(), ": ", cublaslt().status_text(status),
       " in ", call);
}

cudaDataType_t cuda_type(DType t) {
  switch (t) {
    case DType::Float32: return CUDA_R_32F;
    case DType::Float16: return CUDA_R_16F;
    case DType::BFloat16: return CUDA_R_16BF;
    case DType::Float8E4M3: return CUDA_R_8F_E4M3;
    case DType::Float8E5M2: return CUDA_R_8F_E5M2;
    default: fail(Kind::Internal, kOp, "no matrix type for ", t);
  }
}

MatmulDesc::MatmulDesc(cublasComputeType_t compute) {
  cublasLtMatmulDesc_t desc = nullptr;
  check(cublaslt().desc_create(&desc, compute, CUDA_R_32F), kOp, "cublasLtMatmulDescCreate");
  desc_.reset(desc);
}

MatrixLayout::MatrixLayout(DType type, int64_t rows, int64_t cols) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublaslt().layout_create(&layout, cuda_type(type), static_cast<uint64_t>(rows),
                                 static_cast<uint64_t>(cols), rows),
        kOp, "cublasLtMatrixLayoutCreate");
  layout_.reset(layout);
}

MatmulPreference::MatmulPreference(int64_t workspace_bytes, MatmulAlignment alignment) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublaslt().preference_create(&preference), kOp, "cublasLtMatmulPreferenceCreate");
  preference_.reset(preference);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublaslt().preference_set(preference, attribute, &value, sizeof value), kOp,
          "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
  // Split-K sums are reduced in fp32 only: in the type of D every part would be rounded.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const auto operands = static_cast<uint32_t>(alignment.operand_bytes);
  const auto result = static_cast<uint32_t>(alignment.result_bytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, operands);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, operands);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, result);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result);
}

}  // namespace te::cuda
