// Lets an allocation of torch fail, for memory.py: the n-th one after refuse_after(n). On a CPU,
// LD_PRELOAD puts this posix_memalign, which torch calls, before that of the C library. On a GPU,
// torch is told to use allocate_on_gpu and free_on_gpu (CUDAPluggableAllocator).
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

// A thread that has not called the CUDA runtime yet has no current context.
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

// Kernels that were launched before may still use the memory: cuMemFree waits for them.
void free_on_gpu(void* address, ptrdiff_t, int device, void*) {
  static const auto release = of_driver<int(unsigned long long)>("cuMemFree_v2");
  if (address == nullptr) return;
  make_current(device);
  if (release(reinterpret_cast<unsigned long long>(address)) == 0) --live;
}
}
