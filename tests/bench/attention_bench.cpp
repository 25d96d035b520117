// Milliseconds of forward + backward of causal block attention by each of its paths, in fp32 and
// bf16, with and without dropout. Medians of interleaved rounds. With one thread this is CPU time,
// which other load disturbs less; otherwise it is wall time. Whole mechanisms: `birkhoff bench
// attention`.
// Usage: attention_bench paths [B H T D b threads rounds], by default 4 4 1024 32 64 1 15
//        attention_bench sweep [shapes threads rounds], by default 40 1 15: random shapes, and the
//        lowest ratio of the reference's time to ours.
//        attention_bench balance [matrices iterations threads rounds], by default 64 5 1 15: the
//        balance of whole matrices, next to the four lines of eager fp32 operations.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <fmt/core.h>
#include <malloc.h>
#include <time.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string_view>
#include <vector>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "cluster/base/cpu.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {
namespace {

struct Size {
  std::int64_t B = 4, H = 4, T = 1024, D = 32;
  int b = 64;
  std::int64_t rounds = 15;
};

// LibTorch's own allocator, with a count of the allocated bytes.
class CountingAllocator : public at::Allocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    live_ += malloc_usable_size(data);
    peak_ = std::max(peak_.load(), live_.load());
    // LibTorch's kernels require that the context is the data pointer.
    return {data, data, &release, c10::DeviceType::CPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::size_t live() const { return live_; }
  // The largest live() since the last call.
  std::size_t take_peak() { return peak_.exchange(live_); }

 private:
  static void release(void* data);
  std::atomic<std::size_t> live_{0}, peak_{0};
};

CountingAllocator& allocator() {
  static auto* counting = new CountingAllocator;  // tensors may outlive main
  return *counting;
}

void CountingAllocator::release(void* data) {
  allocator().live_ -= malloc_usable_size(data);
  c10::free_cpu(data);
}

// Random heads in the layout of a layer: views of [B, T, H, D].
at::Tensor heads(const Size& s, at::ScalarType dtype = at::kFloat) {
  return at::randn({s.B, s.T, s.H, s.D}).to(dtype).transpose(1, 2).set_requires_grad(true);
}

// CPU time of the process if it has one thread, else wall time.
double seconds() {
  timespec time{};
  clock_gettime(at::get_num_threads() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// One way to compute a result, and the tensors that the gradient is taken for.
struct Candidate {
  std::string name;
  std::function<at::Tensor()> out;
  std::vector<at::Tensor> leaves;
};

struct Measured {
  double ms = 0, mib = 0;
};

// Medians over rounds in which each candidate has one turn.
enum class Pass { kForward, kForwardBackward };
std::vector<Measured> measure(const std::vector<Candidate>& candidates, std::int64_t rounds,
                              Pass pass = Pass::kForwardBackward) {
  constexpr int kWarmUp = 3;
  std::vector<std::vector<double>> times(candidates.size());
  std::vector<Measured> result(candidates.size());
  // The gradient that the layer's next product would return. It is not part of attention's work.
  std::vector<at::Tensor> d_out;
  for (const Candidate& candidate : candidates) d_out.push_back(at::ones_like(candidate.out()));
  for (std::int64_t round = 0; round < kWarmUp + rounds; ++round) {
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      const std::size_t live_before = allocator().live();
      allocator().take_peak();
      const double start = seconds();
      if (pass == Pass::kForward) {
        const at::NoGradGuard no_grad;
        candidates[c].out();
      } else {
        torch::autograd::grad({candidates[c].out()}, candidates[c].leaves, {d_out[c]}, false, false,
                              true);
      }
      if (round >= kWarmUp) times[c].push_back(1e3 * (seconds() - start));
      result[c].mib = static_cast<double>(allocator().take_peak() - live_before) / (1 << 20);
    }
  }
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    std::nth_element(times[c].begin(), times[c].begin() + rounds / 2, times[c].end());
    result[c].ms = times[c][static_cast<std::size_t>(rounds / 2)];
  }
  return result;
}

// A case of block attention. With `sorts`, block weights sort k and v as in Sinkhorn attention.
struct BlockCase {
  std::string name;
  bool sorts = false;
  std::int64_t look_back = 0;
  float dropout = 0;
};

// The tensors of a BlockCase in one dtype, and its candidates.
class BlockProblem {
 public:
  BlockProblem(const BlockCase& block_case, const Size& s, at::ScalarType dtype)
      : case_(block_case), size_(s), N_(s.T / s.b) {
    for (at::Tensor* x : {&q_, &k_, &v_}) *x = heads(s, dtype);
    weights_BHNN_ = at::rand({s.B, s.H, N_, N_})
                        .tril(-1)
                        .div_(static_cast<double>(N_))
                        .to(dtype)
                        .set_requires_grad(true);
    has_sorted_ = (at::arange(N_) > 0).view({1, 1, N_, 1, 1});
  }

  Path fastest() const { return choose_path(attention(Path::kReference), Path::kFused); }
  Candidate candidate(const std::string& name, Path path) const {
    std::vector<at::Tensor> leaves{q_, k_, v_};
    if (case_.sorts) leaves.push_back(weights_BHNN_);
    return {name, [this, path] { return attend_in_blocks(attention(path), path); }, leaves};
  }

 private:
  BlockAttention attention(Path path) const {
    const auto to_blocks = [&](const at::Tensor& x) { return x.unflatten(2, {N_, size_.b}); };
    BlockAttention attention;
    attention.q_BHNbD = to_blocks(q_);
    KeyBlocks own;
    own.k_BHNbD = to_blocks(k_);
    own.v_BHNbD = to_blocks(v_);
    own.window = {.first_offset = -static_cast<int>(case_.look_back), .causal = true};
    own.mask_BHNbb.resize(static_cast<std::size_t>(case_.look_back) + 1);
    if (case_.sorts) {
      KeyBlocks sorted;
      const BlockMixes mixes =
          mix_lower_blocks(weights_BHNN_, {own.k_BHNbD, own.v_BHNbD}, /*diagonal=*/-1, path);
      sorted.k_BHNbD = mixes.y_BHNbD[0];
      sorted.v_BHNbD = mixes.y_BHNbD[1];
      own.k_BHNbD = mixes.x_BHNbD[0];
      own.v_BHNbD = mixes.x_BHNbD[1];
      sorted.mask_BHNbb = {has_sorted_};
      attention.keys.push_back(sorted);
    }
    attention.keys.push_back(own);
    attention.dropout = case_.dropout;
    attention.noise = NoiseKey{.seed = 1,
                               .step = at::zeros({1}, at::kLong),
                               .layer = 0,
                               .sample_ids_B = at::arange(size_.B, at::kLong)};
    return attention;
  }

  BlockCase case_;
  Size size_;
  std::int64_t N_;
  at::Tensor q_, k_, v_, weights_BHNN_, has_sorted_;
};

const std::vector<BlockCase> kBlockCases{
    {"own block"}, {"own and previous block", false, 1}, {"own and sorted block", true}};

void compare_paths(const BlockCase& block_case, const Size& s) {
  const BlockProblem fp32(block_case, s, at::kFloat), bf16(block_case, s, at::kBFloat16);
  const std::vector<Measured> measured =
      measure({fp32.candidate("fused", Path::kFused), bf16.candidate("", Path::kFused),
               fp32.candidate("composed", Path::kSdpa), bf16.candidate("", Path::kSdpa),
               fp32.candidate("eager", Path::kReference), bf16.candidate("", Path::kReference)},
              s.rounds);
  fmt::print("{:<24}", block_case.name);
  for (std::size_t dtype = 0; dtype < 2; ++dtype) {
    const double ms = measured[dtype].ms;
    fmt::print(" {:>9.2f} {:>11.2f} {:>8.2f}", ms, measured[2 + dtype].ms / ms,
               measured[4 + dtype].ms / ms);
  }
  fmt::print(" {:>12.2f}   {:.1f}, {:.1f}, {:.1f}\n", measured[0].ms / measured[1].ms,
             measured[0].mib, measured[2].mib, measured[4].mib);
}

void compare_dropout(const BlockCase& block_case, const Size& s) {
  BlockCase dropping = block_case;
  dropping.dropout = 0.1f;
  fmt::print("{:<24}", block_case.name);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const BlockProblem without(block_case, s, dtype), with(dropping, s, dtype);
    const std::vector<Measured> measured =
        measure({with.candidate("", Path::kFused), without.candidate("", Path::kFused),
                 with.candidate("", Path::kReference)},
                s.rounds);
    fmt::print(" {:>9.2f} {:>11.2f} {:>8.2f}", measured[0].ms, measured[0].ms / measured[1].ms,
               measured[2].ms / measured[0].ms);
  }
  fmt::print("\n");
}

// Random shapes: the ratio of the reference's time to that of the chosen path.
void sweep(std::int64_t num_shapes, std::int64_t rounds) {
  std::mt19937 random(1);
  const auto draw = [&](const std::vector<std::int64_t>& from) {
    return from[random() % from.size()];
  };
  double least = std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < num_shapes; ++i) {
    Size s;
    s.B = draw({1, 2, 4});
    s.H = draw({1, 2, 4, 8});
    s.D = draw({8, 16, 32, 64, 80, 128});
    s.b = static_cast<int>(draw({4, 8, 16, 32, 50, 64, 128, 256}));
    s.T = s.b * std::max<std::int64_t>(1, draw({64, 256, 1024}) / s.b);
    BlockCase block_case = kBlockCases[random() % kBlockCases.size()];
    block_case.dropout = random() % 3 == 0 ? 0.1f : 0.0f;
    const at::ScalarType dtype = random() % 2 ? at::kFloat : at::kBFloat16;
    const BlockProblem problem(block_case, s, dtype);
    const std::vector<Measured> measured =
        measure({problem.candidate("", problem.fastest()), problem.candidate("", Path::kReference)},
                rounds);
    const double ratio = measured[1].ms / measured[0].ms;
    least = std::min(least, ratio);
    fmt::print("{:<24} {} B={} H={} T={:<4} D={:<3} b={:<3} dropout {}: {:8.3f} ms, x {:.2f}\n",
               block_case.name, at::toString(dtype), s.B, s.H, s.T, s.D, s.b, block_case.dropout,
               measured[0].ms, ratio);
  }
  fmt::print("least: {:.2f}\n", least);
}

void compare(const Size& s) {
  fmt::print("forward + backward, medians of {}: B={} H={} T={} D={} b={}, {} thread(s), {}\n",
             s.rounds, s.B, s.H, s.T, s.D, s.b, at::get_num_threads(), name_of(instruction_set()));
  if (s.T % s.b != 0) return;
  fmt::print("\n{:<24}", "attention in blocks");
  for (const char* dtype : {"fp32", "bf16"}) {
    fmt::print(" {:>6} ms {:>11} {:>8}", dtype, "x composed", "x eager");
  }
  fmt::print(" {:>12}   fp32 MiB of the three\n", "fp32 / bf16");
  for (const BlockCase& block_case : kBlockCases) compare_paths(block_case, s);

  fmt::print("\n{:<24}", "with dropout 0.1");
  for (const char* dtype : {"fp32", "bf16"}) {
    fmt::print(" {:>6} ms {:>11} {:>8}", dtype, "/ without", "x eager");
  }
  fmt::print("\n");
  for (const BlockCase& block_case : kBlockCases) compare_dropout(block_case, s);
}

at::Tensor eager_balance(const at::Tensor& scores, std::int64_t iterations) {
  at::Tensor p = (scores - scores.amax({-2, -1}, /*keepdim=*/true)).exp();
  for (std::int64_t i = 0; i < iterations; ++i) {
    p = p / p.sum({-2}, /*keepdim=*/true);
    p = p / p.sum({-1}, /*keepdim=*/true);
  }
  return p;
}

void compare_balances(std::int64_t matrices, std::int64_t iterations, std::int64_t rounds) {
  fmt::print("balance of {} matrices, {} iterations, fp32, {} thread(s), {}\n\n", matrices,
             iterations, at::get_num_threads(), name_of(instruction_set()));
  fmt::print("{:>4} {:>12} {:>10} {:>22} {:>10}\n", "N", "forward, us", "x eager",
             "forward + backward, us", "x eager");
  for (const std::int64_t N : {4, 8, 16, 32, 64, 128, 256}) {
    const at::Tensor scores = at::randn({matrices, N, N}).set_requires_grad(true);
    const std::vector<Candidate> candidates{
        {"ours", [&] { return balance(scores, iterations, Path::kFused); }, {scores}},
        {"eager", [&] { return eager_balance(scores, iterations); }, {scores}}};
    const auto forward = measure(candidates, rounds, Pass::kForward),
               both = measure(candidates, rounds);
    fmt::print("{:>4} {:>12.1f} {:>10.2f} {:>22.1f} {:>10.2f}\n", N, 1e3 * forward[0].ms,
               forward[1].ms / forward[0].ms, 1e3 * both[0].ms, both[1].ms / both[0].ms);
  }
}

}  // namespace
}  // namespace birkhoff

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode != "paths" && mode != "sweep" && mode != "balance") {
    fmt::print(stderr, "usage: attention_bench paths|sweep|balance ...; see attention_bench.cpp\n");
    return 2;
  }
  const auto argument = [&](int i, std::int64_t otherwise) {
    return i + 1 < argc ? std::atoll(argv[i + 1]) : otherwise;
  };
  c10::SetCPUAllocator(&birkhoff::allocator(), /*priority=*/1);
  if (mode == "sweep") {
    birkhoff::compute_on_cpu(static_cast<int>(argument(2, 1)));
    birkhoff::sweep(argument(1, 40), argument(3, 15));
    return 0;
  }
  if (mode == "balance") {
    birkhoff::compute_on_cpu(static_cast<int>(argument(3, 1)));
    birkhoff::compare_balances(argument(1, 64), argument(2, 5), argument(4, 15));
    return 0;
  }
  birkhoff::Size size;
  size.B = argument(1, size.B);
  size.H = argument(2, size.H);
  size.T = argument(3, size.T);
  size.D = argument(4, size.D);
  size.b = static_cast<int>(argument(5, size.b));
  birkhoff::compute_on_cpu(static_cast<int>(argument(6, 1)));
  size.rounds = argument(7, size.rounds);
  birkhoff::compare(size);
}
