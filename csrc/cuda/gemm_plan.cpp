#include "cuda/gemm_plan.h"

#include <algorithm>

#include "core/few_sizes.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "gemm";
constexpr size_t kMostPlans = 8192;  // bounds the memory of a model whose sizes never repeat

// The largest power of two, up to kEnough, that divides all addresses; null pointers are ignored.
int32_t alignment_of(std::initializer_list<const void*> pointers) {
  constexpr uintptr_t kEnough = 256;  // no kernel asks for more
  uintptr_t bits = kEnough;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int32_t>(bits & -bits);
}

GemmProblem problem_of(const GemmArgs& args) {
  const TensorView& a = args.a.data;
  const TensorView& b = args.b.data;
  return {.m = args.a.transposed ? a.cols() : a.rows(),
          .n = args.b.transposed ? b.cols() : b.rows(),
          .k = args.a.transposed ? a.rows() : a.cols(),
          .a = a.dtype,
          .b = b.dtype,
          .d = args.d.dtype,
          .a_transposed = args.a.transposed,
          .b_transposed = args.b.transposed,
          .fast_accumulation = args.fast_accumulation && is_fp8(a.dtype),
          .a_blocks = args.a.blocks,
          .b_blocks = args.b.blocks,
          .adds = args.addend && args.addend.data != args.d.data};
}

cublasComputeType_t compute_type(const GemmKey& key) {
  const bool tf32 = key.problem.a == DType::Float32 && key.allow_tf32;
  return tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// The layout of an operand. What we store as row-major [rows, cols] is column-major [cols, rows] to
// cuBLASLt.
MatrixLayout layout_of(DType type, int64_t outer, int64_t k, bool transposed) {
  return transposed ? MatrixLayout(type, outer, k) : MatrixLayout(type, k, outer);
}

// Whether algorithms were timed on this device: on Hopper.
bool is_measured(int32_t device) {
  constexpr int kMeasuredOn = 90;
  return device_limits({DeviceType::CUDA, device}).capability == kMeasuredOn;
}

// Block scales came with cuBLASLt 12.9. The library that is opened at run time has the major
// version of our headers, but may be older than they are, and then refuses the attribute.
void set_scale_modes([[maybe_unused]] MatmulDesc& desc, [[maybe_unused]] const GemmProblem& p) {
#if CUBLAS_VERSION >= 120900
  const auto mode = [](ScaleBlocks blocks) {
    return static_cast<int32_t>(blocks == ScaleBlocks::Rows
                                    ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                    : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
  };
  desc.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode(p.b_blocks));
  desc.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode(p.a_blocks));
#else
  fail(Kind::Unsupported, kOp,
       "expected a build with cuBLASLt 12.9 or newer for block scales, got ", CUBLAS_VER_MAJOR, '.',
       CUBLAS_VER_MINOR);
#endif
}

}  // namespace

GemmKey::GemmKey(const GemmArgs& args)
    : problem(problem_of(args)),
      has_bias(args.bias),
      allow_tf32(args.allow_tf32),
      device(args.a.data.device.index),
      alignment{alignment_of({args.a.data.data, args.b.data.data}),
                alignment_of({args.d.data, args.addend.data, args.bias.data})},
      workspace_bytes(args.workspace.bytes()),
      counts_tiles(args.counts_tiles) {}

size_t GemmKeyHash::operator()(const GemmKey& key) const {
  const GemmProblem& p = key.problem;
  uint64_t flags = 0;
  for (const DType part : {p.a, p.b, p.d}) flags = flags << 4 | static_cast<uint64_t>(part);
  for (const bool part : {p.a_transposed, p.b_transposed, p.fast_accumulation, p.adds, key.has_bias,
                          key.allow_tf32, key.counts_tiles})
    flags = flags << 1 | static_cast<uint64_t>(part);
  for (const ScaleBlocks part : {p.a_blocks, p.b_blocks})
    flags = flags << 2 | static_cast<uint64_t>(part);
  uint64_t hash = flags << 32 | static_cast<uint64_t>(key.alignment.operand_bytes) << 16 |
                  static_cast<uint64_t>(key.alignment.result_bytes);
  for (const int64_t part : {p.m, p.n, p.k, int64_t{key.device}, key.workspace_bytes}) {
    constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: spreads close numbers
    hash = (hash ^ static_cast<uint64_t>(part)) * kOdd;
    hash ^= hash >> 32;
  }
  return hash;
}

std::ostream& operator<<(std::ostream& out, const GemmKey& key) {
  const GemmProblem& p = key.problem;
  out << p.a << " a" << (p.a_transposed ? " (transposed)" : "") << " times " << p.b << " b"
      << (p.b_transposed ? " (transposed)" : "") << " into " << p.d;
  if (p.a_blocks != ScaleBlocks::Whole)
    out << ", with scales of " << p.a_blocks << " and " << p.b_blocks;
  if (p.adds) out << ", plus a matrix";
  if (key.has_bias) out << ", with bias";
  return out << "; m = " << p.m << ", n = " << p.n << ", k = " << p.k << ", operands aligned to "
             << key.alignment.operand_bytes << " bytes, the result, the addend and the bias to "
             << key.alignment.result_bytes;
}

// We compute D = A B^T with row-major matrices. cuBLASLt's are column-major: in our memory it sees
// D^T, A^T and B^T. So it computes D^T = B A^T, with our b as its A and our a as its B. It sees a b
// stored as [n, k] as [k, n], and must transpose it; a b stored as [k, n] (`transposed`) it sees as
// it needs it. For a it is the other way round. No code outside this file knows of the swap.
GemmPlan::GemmPlan(const GemmKey& key, const GemmArgs& args, const GemmPlan* similar)
    : key_(key),
      handle_(cublaslt_handle(args.a.data.device)),
      compute_(compute_type(key)),
      desc_(compute_),
      a_(layout_of(key.problem.b, key.problem.n, key.problem.k, key.problem.b_transposed)),
      b_(layout_of(key.problem.a, key.problem.m, key.problem.k, key.problem.a_transposed)),
      d_(key.problem.d, key.problem.n, key.problem.m) {
  const GemmProblem& p = key.problem;
  desc_.set(CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
  desc_.set(CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  desc_.set(CUBLASLT_MATMUL_DESC_EPILOGUE,
            key.has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
  if (is_fp8(p.a))
    desc_.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast_accumulation));
  if (p.a_blocks != ScaleBlocks::Whole) set_scale_modes(desc_, p);
  if (key.has_bias)
    desc_.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(gemm_bias_dtype(p.a, p.d)));
  set_pointers(args);
  if (const auto chosen = choose(similar)) use(*chosen);
}

void GemmPlan::use(const cublasLtMatmulAlgo_t& algorithm) {
  algorithm_ = algorithm;
  workspace_bytes_ =
      workspace_bytes(terms(), algorithm, key_.counts_tiles || !is_measured(key_.device));
}

void GemmPlan::set_pointers(const GemmArgs& args) {
  if (is_fp8(key_.problem.a)) {
    desc_.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, args.b.scales.data);
    desc_.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args.a.scales.data);
  }
  if (key_.has_bias) desc_.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias.data);
}

GemmTerms GemmPlan::terms() const {
  const GemmProblem& p = key_.problem;
  return {handle_,
          compute_,
          {cuda_type(p.b), cuda_type(p.a), cuda_type(p.d), cuda_type(p.d)},
          desc_.get(),
          {a_.get(), b_.get(), d_.get(), d_.get()},
          key_.workspace_bytes,
          p.a,
          p.k};
}

std::vector<cublasLtMatmulAlgo_t> GemmPlan::guesses(int limit) const {
  auto found = guess_algorithms(terms(), key_.alignment, limit);
  require(!found.empty(), Kind::Unsupported, kOp, "expected a product that cuBLASLt ",
          cublaslt().version(), " has a kernel for, got ", key_);
  return found;
}

// The table holds for Hopper and aligned tensors. It was measured without a bias, which changes
// little.
std::optional<cublasLtMatmulAlgo_t> GemmPlan::choose(const GemmPlan* similar) const {
  constexpr int kPackBytes = 16;
  const bool aligned =
      key_.alignment.operand_bytes >= kPackBytes && key_.alignment.result_bytes >= kPackBytes;
  const bool measured = aligned && is_measured(key_.device);
  if (const auto found = measured ? find_in_table(key_.problem) : std::nullopt)
    if (const auto built = build_algorithm(terms(), *found)) return built;
  if (similar != nullptr && similar->algorithm_ && fits(terms(), *similar->algorithm_))
    return similar->algorithm_;
  if (!is_fp8(key_.problem.a)) return guesses(1).front();
  const auto found = guess_algorithms(terms(), key_.alignment, 1);
  return found.empty() ? std::nullopt : std::optional(found.front());
}

bool GemmPlan::run(const GemmArgs& args, Stream stream) {
  if (!algorithm_) return false;
  constexpr float kOne = 1.0f;
  constexpr float kZero = 0.0f;
  set_pointers(args);
  const void* c = args.addend ? args.addend.data : args.d.data;
  const cublasStatus_t status = cublaslt().matmul(
      handle_, desc_.get(), &kOne, args.b.data.data, a_.get(), args.a.data.data, b_.get(),
      args.addend ? &kOne : &kZero, c, d_.get(), args.d.data, d_.get(), &*algorithm_,
      args.workspace.data, static_cast<size_t>(workspace_bytes_), stream_of(stream));
  // For FP8 operands that are not aligned, cuBLASLt also offers algorithms that it then refuses.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED && is_fp8(key_.problem.a)) return false;
  check(status, kOp, "cublasLtMatmul");
  return true;
}

bool GemmPlanCache::run(const GemmArgs& args, Stream stream) {
  const GemmKey key(args);
  const std::scoped_lock lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    if (plans_.size() >= kMostPlans) plans_.clear();
    auto plan = std::make_unique<GemmPlan>(key, args, similar_to(key, args));
    found = plans_.emplace(key, std::move(plan)).first;
    ++built_;
  }
  last_ = found->second.get();
  return last_->run(args, stream);
}

const GemmPlan* GemmPlanCache::similar_to(const GemmKey& key, const GemmArgs& args) {
  constexpr int kMostGuesses = 64;
  constexpr size_t kMostVaried = 1024;
  if (varied_.size() >= kMostVaried) varied_.clear();
  if (rounded_.size() >= kMostPlans) rounded_.clear();
  GemmKey rounded = key;
  for (int64_t GemmProblem::*size : {&GemmProblem::m, &GemmProblem::k}) {
    GemmKey family = key;
    family.problem.*size = 0;
    if (++varied_[family] > kMostGuesses)
      rounded.problem.*size = round_to_few_sizes(key.problem.*size, 8);
  }
  if (rounded == key) return nullptr;
  std::unique_ptr<GemmPlan>& plan = rounded_[rounded];
  if (!plan) plan = std::make_unique<GemmPlan>(rounded, args, nullptr);
  return plan.get();
}

int64_t GemmPlanCache::built() const {
  const std::scoped_lock lock(mutex_);
  return built_;
}

GemmPlanCache& gemm_plans() {
  static auto* cache = new GemmPlanCache;  // never destroyed: cuBLASLt may be unloaded before it
  return *cache;
}

}  // namespace te::cuda
