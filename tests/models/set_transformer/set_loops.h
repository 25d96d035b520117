// Small classifiers of point sets, and their definition as loops in fp64 over matrices of one set.
//
// Legend: B batch, N points, M points of another set, C channels.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/models/model_fixture.h"

namespace birkhoff {

inline constexpr std::int64_t kPoints = 7, kCoordinates = 3, kChannels = 8, kSetHeads = 2;

// A classifier of sets of 7 points into 3 classes, with two layers of 3 inducing points.
inline configs::Config set_config(const std::vector<std::string>& settings = {}) {
  std::vector<std::string> all = {"model.bias=true"};
  all.insert(all.end(), settings.begin(), settings.end());
  return parse_config(
      "task { point_sets { classes: 3 set_transformer { inducing_points: 3 } } } "
      "data { corpus: 'none' sequence_length: 7 } train { precision: fp64 } "
      "model { layers: 2 channels: 8 heads: 2 }",
      "test", all);
}

inline std::string set_attention(int half_steps) {
  return half_steps == 0 ? "model.attention.0={ group { mechanism { dense {} } } }"
                         : "model.attention.0={ group { mechanism { sinkformer { half_steps: " +
                               std::to_string(half_steps) + " } } } }";
}
inline const std::string kSet = "task.point_sets.set_transformer.";

// Values that look random and depend only on the seed.
inline at::Tensor values_of(at::IntArrayRef shape, std::int64_t seed) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  const at::Tensor place = at::arange(count, at::kDouble) + 17.0 * static_cast<double>(seed);
  return (place * place * 0.37 + place * 1.7).sin().view(shape);
}

// Every parameter matters: norms and biases, too.
inline void set_values(const Parameters& parameters) {
  std::int64_t seed = 3;
  for (const Parameter& p : parameters.list()) {
    const double center = p.name.ends_with("norm.weight") ? 1 : 0;
    p.value.detach().copy_(values_of(p.value.sizes(), seed++) * 0.7 + center);
  }
}

inline std::unique_ptr<Model> make_set_model(const std::vector<std::string>& settings = {}) {
  auto model = make_model(set_config(settings), 0, at::kCPU);
  set_values(model->parameters());
  return model;
}

inline Batch make_sets(std::int64_t batch, std::int64_t seed = 1) {
  Batch sets;
  sets.fields["points"] = values_of({batch, kPoints, kCoordinates}, seed).to(at::kFloat);
  sets.fields["labels"] = at::arange(batch, at::kLong).remainder(3);
  sets.sample_ids_B = at::arange(batch, at::kLong) + 100;
  return sets;
}

inline at::Tensor log_probabilities_of(Model& model, const Batch& batch) {
  return model.classifier()->log_probabilities(batch);
}

// Of the layer norms: model.norm_epsilon is a float.
constexpr double kEpsilon = 1e-5F;

struct Matrix {
  Matrix(std::size_t of_rows, std::size_t of_columns)
      : rows(of_rows), columns(of_columns), values(of_rows * of_columns) {}
  explicit Matrix(const at::Tensor& x)
      : Matrix(static_cast<std::size_t>(x.size(0)), static_cast<std::size_t>(x.size(1))) {
    const at::Tensor copy = x.detach().to(at::kDouble).contiguous();
    std::copy_n(copy.const_data_ptr<double>(), values.size(), values.begin());
  }
  double& at(std::size_t i, std::size_t j) { return values[i * columns + j]; }
  double at(std::size_t i, std::size_t j) const { return values[i * columns + j]; }

  std::size_t rows, columns;
  std::vector<double> values;
};

inline double difference(const Matrix& a, const at::Tensor& b) {
  const Matrix other(b);
  double most = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    most = std::max(most, std::abs(a.values[i] - other.values[i]));
  }
  return a.rows == other.rows && a.columns == other.columns ? most : INFINITY;
}

// The weights of T half-steps for scores [N, M]: rows, then columns to N / M, then rows, ...
inline Matrix balanced(Matrix weights, int half_steps) {
  for (double& value : weights.values) value = std::exp(value);
  for (int t = 1; t <= half_steps; ++t) {
    const bool of_rows = t % 2 == 1;
    const std::size_t lines = of_rows ? weights.rows : weights.columns,
                      size = of_rows ? weights.columns : weights.rows;
    for (std::size_t line = 0; line < lines; ++line) {
      double sum = 0;
      for (std::size_t i = 0; i < size; ++i)
        sum += of_rows ? weights.at(line, i) : weights.at(i, line);
      const double target =
          of_rows ? 1 : static_cast<double>(weights.rows) / static_cast<double>(weights.columns);
      for (std::size_t i = 0; i < size; ++i) {
        (of_rows ? weights.at(line, i) : weights.at(i, line)) *= target / sum;
      }
    }
  }
  return weights;
}

class Loops {
 public:
  Loops(const Parameters& parameters, int half_steps, bool norms)
      : half_steps_(half_steps), norms_(norms) {
    for (const Parameter& p : parameters.list()) values_[p.name] = p.value.detach();
  }

  Matrix points(const std::string& name) const { return Matrix(values_.at(name)); }
  // Outputs [first, first + count) of the linear layer.
  Matrix linear(const std::string& name, const Matrix& x, std::size_t first = 0,
                std::size_t count = 0) const {
    const Matrix weight(values_.at(name + ".weight"));
    const Matrix bias(values_.at(name + ".bias").unsqueeze(0));
    if (count == 0) count = weight.rows;
    EXPECT_EQ(weight.columns, x.columns) << name;
    Matrix y(x.rows, count);
    for (std::size_t n = 0; n < x.rows; ++n) {
      for (std::size_t o = 0; o < count; ++o) {
        y.at(n, o) = bias.at(0, first + o);
        for (std::size_t i = 0; i < x.columns; ++i) {
          y.at(n, o) += x.at(n, i) * weight.at(first + o, i);
        }
      }
    }
    return y;
  }
  void norm(const std::string& name, Matrix& x) const {
    if (!norms_) return;
    const Matrix weight(values_.at(name + ".weight").unsqueeze(0)),
        bias(values_.at(name + ".bias").unsqueeze(0));
    for (std::size_t n = 0; n < x.rows; ++n) {
      double mean = 0, variance = 0;
      for (std::size_t c = 0; c < x.columns; ++c) mean += x.at(n, c) / kChannels;
      for (std::size_t c = 0; c < x.columns; ++c) {
        variance += (x.at(n, c) - mean) * (x.at(n, c) - mean) / kChannels;
      }
      for (std::size_t c = 0; c < x.columns; ++c) {
        x.at(n, c) =
            (x.at(n, c) - mean) / std::sqrt(variance + kEpsilon) * weight.at(0, c) + bias.at(0, c);
      }
    }
  }
  Matrix block(const std::string& name, const Matrix& x, const Matrix& y, bool own,
               int half_steps) const {
    constexpr std::size_t C = kChannels, D = kChannels / kSetHeads;
    const std::string a = name + ".attention";
    const Matrix q = own ? linear(a + ".query_key_value", x, 0, C) : linear(a + ".query", x),
                 k = own ? linear(a + ".query_key_value", x, C, C)
                         : linear(a + ".key_value", y, 0, C),
                 v = own ? linear(a + ".query_key_value", x, 2 * C, C)
                         : linear(a + ".key_value", y, C, C);
    Matrix o = q;
    for (std::size_t h = 0; h < kSetHeads; ++h) {
      Matrix scores(q.rows, k.rows);
      for (std::size_t n = 0; n < q.rows; ++n) {
        for (std::size_t m = 0; m < k.rows; ++m) {
          for (std::size_t d = h * D; d < (h + 1) * D; ++d) {
            scores.at(n, m) += q.at(n, d) * k.at(m, d) / std::sqrt(static_cast<double>(C));
          }
        }
      }
      const Matrix weights = balanced(scores, half_steps);
      for (std::size_t n = 0; n < q.rows; ++n) {
        for (std::size_t d = h * D; d < (h + 1) * D; ++d) {
          for (std::size_t m = 0; m < k.rows; ++m) o.at(n, d) += weights.at(n, m) * v.at(m, d);
        }
      }
    }
    norm(name + ".attention_norm", o);
    const Matrix branch = linear(name + ".feed_forward", o);
    for (std::size_t i = 0; i < o.values.size(); ++i) {
      o.values[i] += std::max(0.0, branch.values[i]);
    }
    norm(name + ".output_norm", o);
    return o;
  }
  Matrix layer(const std::string& name, const Matrix& x) const {
    if (!values_.contains(name + ".inducing.points")) return block(name, x, x, true, half_steps_);
    const Matrix summary =
        block(name + ".inducing", points(name + ".inducing.points"), x, false, half_steps_);
    return block(name, x, summary, false, half_steps_);
  }
  // The logits [1, K] of a set [N, P].
  Matrix network(const at::Tensor& set, int pooling_half_steps) const {
    Matrix x(set);
    for (const char* name : {"blocks.0", "blocks.1"}) x = layer(name, x);
    Matrix pooled = block("pooling", points("pooling.seeds"), x, false, pooling_half_steps);
    pooled.columns *= pooled.rows;
    pooled.rows = 1;
    return linear("output", pooled);
  }

 private:
  std::map<std::string, at::Tensor> values_;
  int half_steps_;
  bool norms_;
};

}  // namespace birkhoff
