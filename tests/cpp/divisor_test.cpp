// Compares Divisor, which multiplies and shifts, with the operator /.
#include "core/divisor.h"

#include <gtest/gtest.h>

namespace te {
namespace {

TEST(Divisor, DividesAsTheOperatorDoes) {
  constexpr uint32_t kLast = (1u << 31) - 1;
  for (const uint32_t by : {1u, 2u, 3u, 6u, 7u, 12u, 96u, 641u, 65535u, 65536u, 65537u, 715827883u,
                            kLast - 1, kLast, 1u << 31}) {
    const Divisor divisor(by);
    EXPECT_EQ(divisor.value(), by);
    for (uint32_t quotient = 0; quotient <= 100; ++quotient) {
      // Numbers around small multiples, and around the last ones below 2^31.
      for (const uint64_t multiple :
           {uint64_t{quotient} * by, (kLast / by - quotient) * uint64_t{by}}) {
        for (const uint64_t number : {multiple - 1, multiple, multiple + 1}) {
          if (number > kLast) continue;
          const auto n = static_cast<uint32_t>(number);
          EXPECT_EQ(divisor.quotient(n), n / by) << n << " / " << by;
        }
      }
    }
  }
}

}  // namespace
}  // namespace te
