// Definitions of symbols that a current libstdc++ uses, but that exist only in versions of glibc
// which are newer than a wheel may require. They are linked in if TE_GLIBC_STUBS is set.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

extern "C" {

// glibc 2.32: whether the process has a single thread, so that shared pointers may count without
// atomic instructions. Here it is always 0.
extern const char __libc_single_threaded;
const char __libc_single_threaded = 0;

// glibc 2.36: the source of random numbers of std::random_device.
uint32_t arc4random() {
  uint32_t number = 0;
  while (syscall(SYS_getrandom, &number, sizeof number, 0) != sizeof number) {
  }
  return number;
}
}
