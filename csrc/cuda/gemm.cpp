// gemm on CUDA: finds the plan of a call in a cache, or makes it, and launches it (gemm_plan.h).
// The other functions are for tuning: they show or replace the algorithm of the last plan.
#include "ops/gemm.h"

#include "cuda/gemm_plan.h"
#include "ops/gemm_tuning.h"

namespace te::cuda {

bool gemm(const GemmArgs& args, Stream stream) {
  const TensorView& a = args.a.data;
  const DeviceLimits& device = device_limits(a.device);
  const bool in_blocks = args.a.blocks != ScaleBlocks::Whole;
  if (is_fp8(a.dtype) && !(in_blocks ? device.block_scales : device.fp8_products)) return false;
  const DeviceGuard guard(a.device);
  return gemm_plans().run(args, stream);
}

int64_t gemm_plan_count() { return gemm_plans().built(); }

std::string gemm_problem() {
  return gemm_plans().with_last([](GemmPlan& plan) { return concat(plan.key().problem); });
}

GemmAlgorithm gemm_algorithm() {
  return gemm_plans().with_last(
      [](GemmPlan& plan) { return describe_algorithm(plan.algorithm()); });
}

std::vector<GemmAlgorithm> gemm_guesses(int limit) {
  return gemm_plans().with_last([&](GemmPlan& plan) {
    std::vector<GemmAlgorithm> descriptions;
    for (const auto& guess : plan.guesses(limit)) descriptions.push_back(describe_algorithm(guess));
    return descriptions;
  });
}

std::vector<GemmAlgorithm> gemm_neighbours(const GemmAlgorithm& algorithm) {
  return gemm_plans().with_last(
      [&](GemmPlan& plan) { return neighbours_of(plan.terms(), algorithm); });
}

bool gemm_use(const GemmAlgorithm& algorithm) {
  return gemm_plans().with_last([&](GemmPlan& plan) {
    const auto built = build_algorithm(plan.terms(), algorithm);
    if (built) plan.use(*built);
    return built.has_value();
  });
}

void gemm_use_guess() {
  gemm_plans().with_last([](GemmPlan& plan) { plan.use(plan.guesses(1).front()); });
}

}  // namespace te::cuda
