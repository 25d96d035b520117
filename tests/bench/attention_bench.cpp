// Milliseconds of forward + backward of each mechanism, next to dense attention, causal, fp32.
// Usage: attention_bench [B H T D b threads], by default 4 4 1024 32 64 1.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "attention/attention.h"
#include "configs/attention.pb.h"

namespace birkhoff {
namespace {

struct Size {
  std::int64_t B = 4, H = 4, T = 1024, D = 32;
  int b = 64;
};

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).set_requires_grad(true); }

// Inputs as a layer makes them: heads are views of [B, T, H, D].
AttentionInput make_input(const Size& s) {
  const auto heads = [&] {
    return at::randn({s.B, s.T, s.H, s.D}).transpose(1, 2).set_requires_grad(true);
  };
  AttentionInput in;
  in.q_BHLD = heads();
  in.k_BHSD = heads();
  in.v_BHSD = heads();
  in.x_q_BLC = in.x_kv_BSC = leaf({s.B, s.T, s.H * s.D});
  return in;
}

double milliseconds(const configs::Mechanism& config, const Size& s) {
  const auto group = make_single_group();
  Parameters parameters(1, at::kFloat);
  const MechanismShape shape{
      .channels = s.H * s.D, .heads = s.H, .head_dim = s.D, .sequence_length = s.T, .causal = true};
  const auto mechanism =
      make_mechanism(config, shape, "attention", parameters, {*group, *group, *group});
  const AttentionInput in = make_input(s);
  std::vector<at::Tensor> leaves{in.q_BHLD, in.k_BHSD, in.v_BHSD, in.x_q_BLC};
  for (const Parameter& parameter : parameters.list()) leaves.push_back(parameter.value);
  std::vector<double> times;
  for (int i = 0; i < 12; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor out = mechanism->forward(in).out_BHLD;
    torch::autograd::grad({out}, leaves, {at::ones_like(out)}, false, false, true);
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
            .count());
  }
  return *std::min_element(times.begin(), times.end());
}

void report(const char* name, const configs::Mechanism& config, const Size& s, double dense) {
  const double ms = milliseconds(config, s);
  fmt::print("{:<28} {:>8.2f} ms  {:>5.2f} x dense\n", name, ms, ms / dense);
}

void run(const Size& s) {
  fmt::print("forward + backward, best of 12: B={} H={} T={} D={} b={}, {} thread(s)\n", s.B, s.H,
             s.T, s.D, s.b, at::get_num_threads());
  configs::Mechanism dense;
  dense.mutable_dense();
  const double dense_ms = milliseconds(dense, s);
  fmt::print("{:<28} {:>8.2f} ms\n", "dense", dense_ms);
  for (const int look_back : {0, 1}) {
    configs::Mechanism local;
    local.mutable_block_local()->set_block(s.b);
    local.mutable_block_local()->set_look_back(look_back);
    report(look_back ? "block_local look_back 1" : "block_local", local, s, dense_ms);
  }
  const auto* modes = configs::SinkhornAttention::CausalBalance_descriptor();
  for (int i = 0; i < modes->value_count(); ++i) {
    configs::Mechanism sinkhorn;
    sinkhorn.mutable_sinkhorn()->set_block(s.b);
    sinkhorn.mutable_sinkhorn()->set_causal_balance(
        static_cast<configs::SinkhornAttention::CausalBalance>(modes->value(i)->number()));
    report(fmt::format("sinkhorn {}", modes->value(i)->name()).c_str(), sinkhorn, s, dense_ms);
  }
}

}  // namespace
}  // namespace birkhoff

int main(int argc, char** argv) {
  birkhoff::Size size;
  const auto argument = [&](int i, std::int64_t otherwise) {
    return i < argc ? std::atoll(argv[i]) : otherwise;
  };
  size.B = argument(1, size.B);
  size.H = argument(2, size.H);
  size.T = argument(3, size.T);
  size.D = argument(4, size.D);
  size.b = static_cast<int>(argument(5, size.b));
  at::set_num_threads(static_cast<int>(argument(6, 1)));
  birkhoff::run(size);
}
