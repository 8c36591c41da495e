// The arithmetic of one value in a step of Adam, which both backends call.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "core/hd.h"

namespace te {

// The constants of one step, which are equal for all values.
struct AdamStep {
  float factor;                    // multiplies every gradient
  float gradient_decay;            // this times the parameter is added to the gradient; AdamW: 0
  float parameter_factor;          // AdamW (decoupled): 1 - rate * decay, else 1
  float mean_decay, square_decay;  // beta
  float mean_gain, square_gain;    // 1 - beta
  float step_size;                 // rate / (1 - beta1^step)
  float square_scale;              // 1 / (1 - beta2^step)
  float epsilon;
};

struct AdamValue {
  float parameter, mean, square;
};

TE_HD AdamValue stepped(const AdamStep& s, AdamValue value, float gradient) {
  gradient = gradient * s.factor + s.gradient_decay * value.parameter;
  value.parameter *= s.parameter_factor;
  value.mean = s.mean_decay * value.mean + s.mean_gain * gradient;
  value.square = s.square_decay * value.square + s.square_gain * (gradient * gradient);
  value.parameter -= s.step_size * value.mean / (sqrtf(value.square * s.square_scale) + s.epsilon);
  return value;
}

// An fp32 parameter in two halves: its bf16 weight, and the low 16 bits. The weight is the
// parameter rounded to nearest, so if the low bits are 0x8000 or more (negative as int16), its bits
// are one more than the upper bits of the parameter. A NaN has no low bits, with which the weight
// might not be a NaN.
struct ParameterHalves {
  BFloat16 weight;
  int16_t low;

  TE_HD static ParameterHalves of(float parameter) {
    const uint32_t bits = std::isnan(parameter) ? 0x7fc00000u : float_bits(parameter);
    ParameterHalves halves;
    halves.low = static_cast<int16_t>(static_cast<uint16_t>(bits));
    halves.weight.bits = static_cast<uint16_t>((bits >> 16) + (halves.low < 0 ? 1 : 0));
    return halves;
  }
  TE_HD float parameter() const {
    const auto upper = static_cast<uint16_t>(weight.bits - (low < 0 ? 1 : 0));
    return bits_float(static_cast<uint32_t>(upper) << 16 | static_cast<uint16_t>(low));
  }
};

// The settings of the optimizer, which the host knows. The number of the step, the learning rate
// and the factor of gradients are tensors, so on CUDA the kernel calls `at`.
struct AdamRules {
  float log_beta1, log_beta2, mean_decay, square_decay, mean_gain, square_gain, epsilon, decay;
  bool decoupled;

  TE_HD AdamStep at(float step, float rate, float factor) const {
    AdamStep s;
    s.factor = factor;
    s.gradient_decay = decoupled ? 0.0f : decay;
    s.parameter_factor = decoupled ? 1.0f - rate * decay : 1.0f;
    s.mean_decay = mean_decay;
    s.square_decay = square_decay;
    s.mean_gain = mean_gain;
    s.square_gain = square_gain;
    s.step_size = rate / -expm1f(step * log_beta1);
    s.square_scale = 1.0f / -expm1f(step * log_beta2);
    s.epsilon = epsilon;
    return s;
  }
};

inline AdamRules adam_rules(double beta1, double beta2, double epsilon, double decay,
                            bool decoupled) {
  return {static_cast<float>(std::log(beta1)),
          static_cast<float>(std::log(beta2)),
          static_cast<float>(beta1),
          static_cast<float>(beta2),
          static_cast<float>(1.0 - beta1),
          static_cast<float>(1.0 - beta2),
          static_cast<float>(epsilon),
          static_cast<float>(decay),
          decoupled};
}

}  // namespace te
