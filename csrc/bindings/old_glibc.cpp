// What libstdc++ of today takes from a newer glibc than a wheel may ask for: linked in where
// TE_GLIBC_STUBS is set.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

extern "C" {

// glibc 2.32: whether shared pointers may count without atomic instructions. Never.
extern const char __libc_single_threaded;
const char __libc_single_threaded = 0;

// glibc 2.36: what std::random_device reads.
uint32_t arc4random() {
  uint32_t number = 0;
  while (syscall(SYS_getrandom, &number, sizeof number, 0) != sizeof number) {
  }
  return number;
}
}
