// The CUDA backend of a build without CUDA: every entry says so.
#include "core/error.h"
#include "cuda/runtime.h"
#include "ops/quantize.h"

namespace te::cuda {
namespace {

[[noreturn]] void absent(const char* op) {
  fail(Kind::Unsupported, op,
       "got a CUDA tensor, but this build has the CPU backend only; reinstall with nvcc on the "
       "PATH (TE_CUDA=ON pip install .)");
}

}  // namespace

bool built_with_cuda() { return false; }
int device_count() { return 0; }

void quantize(const QuantizeArgs&, Stream) { absent("quantize"); }

}  // namespace te::cuda
