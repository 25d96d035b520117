// The update rules of optimizers that treat each element by itself, shared by the CPU loop and the
// GPU kernel. Compiled by g++ and nvcc: no LibTorch here.
//
// A rule has kNumStates numbers of state for each element. factors() computes what all elements
// share, in fp64, and rounds it to their precision; update() applies the rule to one element.
// Legend: p parameter, g gradient, lr learning rate, wd weight decay, of parameters with decay
// only, s the factor that turns a summed gradient into a clipped mean, t the number of the update.
#pragma once

#include <cmath>

#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// What factors() gets of a step (runtime/optimizers/step_scalars.h), and t, from 1.
struct UpdateScalars {
  double learning_rate, gradient_scale, num_updates;
};

// AdamW (Loshchilov & Hutter 2019, "Decoupled weight decay regularization", algorithm 2), in
// PyTorch's arithmetic:
//
//   g' = s g,   p <- p - lr wd p,   m <- b1 m + (1 - b1) g',   v <- b2 v + (1 - b2) g'^2
//   p <- p - lr / (1 - b1^t)  m / (sqrt(v / (1 - b2^t)) + epsilon)
struct AdamWRule {
  static constexpr const char* kName = "adamw";
  static constexpr int kNumStates = 2;
  static constexpr const char* kStateNames[kNumStates] = {"m", "v"};

  double beta1, beta2, epsilon, weight_decay;

  template <typename T>
  struct Factors {
    T gradient_scale, beta1, beta2, step_size, inverse_sqrt_correction2, epsilon, keep;
  };

  template <typename T>
  BIRKHOFF_HOST_DEVICE Factors<T> factors(const UpdateScalars& s) const {
    return {static_cast<T>(s.gradient_scale),
            static_cast<T>(beta1),
            static_cast<T>(beta2),
            static_cast<T>(s.learning_rate / (1 - std::pow(beta1, s.num_updates))),
            static_cast<T>(1 / std::sqrt(1 - std::pow(beta2, s.num_updates))),
            static_cast<T>(epsilon),
            static_cast<T>(1 - s.learning_rate * weight_decay)};
  }

  template <typename T>
  BIRKHOFF_HOST_DEVICE static void update(const Factors<T>& f, bool decays, T& p, T g, T& m, T& v) {
    const T gradient = g * f.gradient_scale;
    const T m_new = f.beta1 * m + (1 - f.beta1) * gradient;
    const T v_new = f.beta2 * v + (1 - f.beta2) * gradient * gradient;
    const T denominator = std::sqrt(v_new) * f.inverse_sqrt_correction2 + f.epsilon;
    p = (decays ? f.keep : T{1}) * p - f.step_size * m_new / denominator;
    m = m_new;
    v = v_new;
  }
};

// Stochastic gradient descent with momentum mu, as PyTorch's torch.optim.SGD without dampening;
// nesterov: Sutskever et al. 2013, "On the importance of initialization and momentum in deep
// learning", in the same form.
//
//   g' = s g + wd p,   v <- mu v + g',   p <- p - lr v      (nesterov: p <- p - lr (g' + mu v))
struct SgdRule {
  static constexpr const char* kName = "sgd";
  static constexpr int kNumStates = 1;
  static constexpr const char* kStateNames[kNumStates] = {"v"};

  double momentum, weight_decay;
  bool nesterov;

  // p <- p - lr (gradient_weight g' + velocity_weight v)
  template <typename T>
  struct Factors {
    T gradient_scale, learning_rate, momentum, weight_decay, gradient_weight, velocity_weight;
  };

  template <typename T>
  BIRKHOFF_HOST_DEVICE Factors<T> factors(const UpdateScalars& s) const {
    return {static_cast<T>(s.gradient_scale), static_cast<T>(s.learning_rate),
            static_cast<T>(momentum),         static_cast<T>(weight_decay),
            static_cast<T>(nesterov ? 1 : 0), static_cast<T>(nesterov ? momentum : 1)};
  }

  template <typename T>
  BIRKHOFF_HOST_DEVICE static void update(const Factors<T>& f, bool decays, T& p, T g, T& v) {
    const T gradient = g * f.gradient_scale + (decays ? f.weight_decay : T{0}) * p;
    v = f.momentum * v + gradient;
    p = p - f.learning_rate * (f.gradient_weight * gradient + f.velocity_weight * v);
  }
};

}  // namespace birkhoff
