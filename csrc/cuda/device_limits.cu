#include "cuda/device/dependent_launch.cuh"
#include "cuda/runtime.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "device limits";

__global__ void nothing_kernel() { follow_previous_kernel(); }

DeviceSwitches& switches() {
  static DeviceSwitches set;
  return set;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), kOp);
  return value;
}

int capability_of(int device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
}

// The capability for which the code was compiled that runs on the current device. It is the same
// for all kernels.
int code_of(int device) {
  cudaFuncAttributes kernel{};
  const cudaError_t status = cudaFuncGetAttributes(&kernel, nothing_kernel);
  if (status == cudaErrorNoKernelImageForDevice) {
    cudaGetLastError();
    const int capability = capability_of(device);
    fail(Kind::Unsupported, kOp, "this build has no code for a GPU of compute capability ",
         capability / 10, '.', capability % 10,
         "; build it with TE_CUDA_ARCHS (docs/how-to/gpus.md)");
  }
  check(status, kOp);
  return kernel.ptxVersion;
}

// How many clusters of each size run at once, of blocks with `shared_bytes` each; zeros where the
// driver does not say.
ClusterCounts clusters_of(int shared_bytes) {
  ClusterCounts counts{};
  check(cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             shared_bytes),
        kOp);
  for (int size = 2; size <= kMaxCluster; ++size) {
    LaunchAttributes attributes({}, size);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(size));
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    attributes.add_to(config);
    int& count = counts[static_cast<size_t>(size)];
    if (cudaOccupancyMaxActiveClusters(&count, nothing_kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      count = 0;
    }
  }
  return counts;
}

DeviceFacts facts_of(Device device) {
  const DeviceGuard guard(device);
  DeviceFacts facts{
      .capability = capability_of(device.index),
      .code = code_of(device.index),
      .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device.index),
      .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index)};
  if (facts.code >= kHopperCapability)
    facts.clusters = clusters_of(static_cast<int>(facts.shared_bytes));
  return facts;
}

}  // namespace

void set_device_switches(const DeviceSwitches& on) { switches() = on; }

const DeviceLimits& device_limits(Device device) {
  static std::array<DeviceLimits, kMaxDevices> known{};
  static std::array<std::once_flag, kMaxDevices> asked;
  const auto index = static_cast<size_t>(device.index);
  std::call_once(asked.at(index), [&] { known[index] = limits_of(facts_of(device), switches()); });
  return known[index];
}

DeviceLimits limits_of_device(int index) { return device_limits({DeviceType::CUDA, index}); }

const DeviceLimits& current_device_limits() {
  int current = 0;
  check(cudaGetDevice(&current), kOp);
  return device_limits({DeviceType::CUDA, current});
}

void allow_shared_memory(const void* kernel, Device device, std::string_view op) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), op);
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             most - static_cast<int>(attributes.sharedSizeBytes)),
        op);
}

}  // namespace te::cuda
