#include "ops/merge_attention.h"

#include <algorithm>
#include <array>
#include <compare>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

constexpr const char* kOp = "merge_attention";

// The sizes of the first axes of out.
void sized_like_out(const TensorView& t, const TensorView& out, int rank, std::string_view name) {
  check::same_device(t, out, kOp, name);
  TensorView expected = out;
  expected.rank = rank;
  const auto end = expected.sizes.begin() + rank;
  require(t.rank == rank && std::equal(expected.sizes.begin(), end, t.sizes.begin()), Kind::Value,
          kOp, "expected shape ", ShapeOf{expected}, " for ", name, ", got ", ShapeOf{t});
}

void rows_side_by_side(const TensorView& t, std::string_view name) {
  require(t.size(-1) <= 1 || t.stride(-1) == 1, Kind::Value, kOp,
          "expected the elements of a row of ", name, " side by side, got a stride of ",
          t.stride(-1));
}

// Threads write places one by one, so none may be another one's too.
void places_of_their_own(const TensorView& t, std::string_view name) {
  if (t.numel() == 0) return;
  struct Axis {
    int64_t stride = 0, size = 1;
    auto operator<=>(const Axis&) const = default;
  };
  std::array<Axis, 4> axes;
  for (int i = 0; i < t.rank; ++i) axes.at(static_cast<size_t>(i)) = {t.stride(i), t.size(i)};
  std::sort(axes.begin(), axes.end());
  int64_t reach = 1;  // elements from the first to the last place along the axes so far
  for (const auto [stride, size] : axes) {
    if (size == 1) continue;
    require(stride >= reach, Kind::Value, kOp, "expected ", name,
            " to have memory for each element, got ", t, " with a stride of ", stride, " over ",
            reach, " elements");
    reach += stride * (size - 1);
  }
}

}  // namespace

void merge_attention(const MergeAttentionArgs& args, Stream stream) {
  check::high_precision(args.out, kOp, "out");
  check::high_precision(args.part, kOp, "part");
  require(args.out.dtype == args.part.dtype || args.out.dtype == DType::Float32, Kind::Type, kOp,
          "expected float32 or ", args.part.dtype, " for out, got ", args.out.dtype);
  require(args.out.rank == 4, Kind::Value, kOp, "expected out of shape (a, b, heads, size), got ",
          ShapeOf{args.out});
  sized_like_out(args.part, args.out, 4, "part");
  rows_side_by_side(args.out, "out");
  rows_side_by_side(args.part, "part");
  check::dtype(args.log_sum_exp, DType::Float32, kOp, "log_sum_exp");
  check::dtype(args.part_log_sum_exp, DType::Float32, kOp, "part_log_sum_exp");
  sized_like_out(args.log_sum_exp, args.out, 3, "log_sum_exp");
  sized_like_out(args.part_log_sum_exp, args.out, 3, "part_log_sum_exp");
  places_of_their_own(args.out, "out");
  places_of_their_own(args.log_sum_exp, "log_sum_exp");
  if (args.log_sum_exp.numel() == 0) return;
  on_device(
      args.out, [&] { cpu::merge_attention(args); }, [&] { cuda::merge_attention(args, stream); });
}

}  // namespace te
