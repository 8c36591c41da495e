#include "cpu/row_sink.h"

#include <cmath>

#include "core/scaling.h"

namespace te::cpu {
namespace {

constexpr const char* kOp = "row sink";

template <class Fp8>
void write_codes(const QuantizedView& out, float scale, int64_t row,
                 const std::vector<float>& values) {
  const auto cols = static_cast<int64_t>(values.size());
  uint8_t* rowwise = out.rowwise.ptr<uint8_t>();
  uint8_t* columnwise = out.columnwise.ptr<uint8_t>();
  const int64_t pitch = columnwise ? out.columnwise.stride(-2) : 0;
  for (int64_t j = 0; j < cols; ++j) {
    const uint8_t code = Fp8::encode(values[static_cast<size_t>(j)] * scale);
    if (rowwise) rowwise[row * cols + j] = code;
    if (columnwise) columnwise[j * pitch + row] = code;
  }
}

}  // namespace

RowSink::RowSink(int64_t rows, int64_t cols, const TensorView& plain,
                 const QuantizedView& quantized, const CurrentScale& current)
    : rows_(rows), cols_(cols), plain_(plain), quantized_(quantized), current_(current) {
  if (!quantized_) return;
  float* pair = quantized_.scales.ptr<float>();
  if (quantized_.scale) {
    pair[1] = quantized_.scale.ptr<float>()[0];
    pair[0] = divide(1.0f, pair[1]);
  }
  scale_ = pair[1];
}

float RowSink::write(int64_t row, const std::vector<float>& values) const {
  float amax = 0.0f, rounded_amax = 0.0f;
  if (quantized_.amax || current_)
    for (const float value : values) amax = max_ignoring_nan(amax, std::fabs(value));
  if (plain_) {
    dispatch_high_precision(plain_.dtype, kOp, [&](auto tag) {
      using Out = typename decltype(tag)::type;
      Out* out = plain_.ptr<Out>() + row * cols_;
      for (const float value : values) *out++ = Out(value);
      // Rounding keeps order, so the rounded amax is the amax of the rounded values.
      rounded_amax = static_cast<float>(Out(amax));
    });
  }
  if (quantized_) {
    dispatch_fp8(quantized_.dtype, kOp, [&](auto tag) {
      write_codes<typename decltype(tag)::type>(quantized_, scale_, row, values);
    });
  }
  return current_ ? rounded_amax : amax;
}

void RowSink::finish(float amax) const {
  if (quantized_.amax) {
    float* stored = quantized_.amax.ptr<float>();
    *stored = max_ignoring_nan(*stored, amax);
  }
  keep_current(current_, amax);
}

void keep_current(const CurrentScale& rule, float amax) {
  if (rule.amax) *rule.amax.ptr<float>() = amax;
  if (!rule) return;
  const float scale = current_scale(amax, max_of(rule.dtype), rule.epsilon, rule.power_of_2);
  rule.scales.ptr<float>()[0] = divide(1.0f, scale);
  rule.scales.ptr<float>()[1] = scale;
}

}  // namespace te::cpu
