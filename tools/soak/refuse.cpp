// Refuses torch's n-th allocation from now on: on a CPU in place of the C library's function that
// torch calls (LD_PRELOAD), on a GPU as the allocator that is plugged into torch.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <stdexcept>

namespace {

std::atomic<long> left{0};
std::atomic<long> live{0};

bool refused() { return left > 0 && --left == 0; }

template <class Function>
Function* of_driver(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function*>(driver ? dlsym(driver, name) : nullptr);
}

// A thread that has called nothing of CUDA's runtime has no context.
void make_current(int device) {
  static const auto retain = of_driver<int(void**, int)>("cuDevicePrimaryCtxRetain");
  static const auto set = of_driver<int(void*)>("cuCtxSetCurrent");
  void* context = nullptr;
  if (retain(&context, device) == 0) set(context);
}

}  // namespace

extern "C" {

void refuse_after(long count) { left = count; }
long remaining() { return left; }
long live_on_gpu() { return live; }

int posix_memalign(void** out, size_t alignment, size_t size) {
  static const auto real =
      reinterpret_cast<int (*)(void**, size_t, size_t)>(dlsym(RTLD_NEXT, "posix_memalign"));
  if (alignment == 64 && refused()) return ENOMEM;
  return real(out, alignment, size);
}

void* allocate_on_gpu(ptrdiff_t size, int device, void*) {
  static const auto allocate = of_driver<int(unsigned long long*, size_t)>("cuMemAlloc_v2");
  if (size == 0) return nullptr;
  if (refused()) throw std::runtime_error("out of memory, because a test asked for it");
  make_current(device);
  unsigned long long address = 0;
  if (allocate(&address, static_cast<size_t>(size)) != 0)
    throw std::runtime_error("out of memory of the GPU");
  ++live;
  return reinterpret_cast<void*>(address);
}

// What is freed may be in use by kernels that were launched before: freeing waits for them.
void free_on_gpu(void* address, ptrdiff_t, int device, void*) {
  static const auto release = of_driver<int(unsigned long long)>("cuMemFree_v2");
  if (address == nullptr) return;
  make_current(device);
  if (release(reinterpret_cast<unsigned long long>(address)) == 0) --live;
}
}
