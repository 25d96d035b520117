// Milliseconds of forward + backward, causal, fp32: each mechanism next to dense attention, then
// attention in blocks by each of its paths. Interleaved rounds, medians.
// Usage: attention_bench [B H T D b threads rounds], by default 4 4 1024 32 64 1 15.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/core.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <vector>

#include "attention/attention.h"
#include "attention/block_mix.h"
#include "attention/blocks.h"
#include "configs/attention.pb.h"

namespace birkhoff {
namespace {

struct Size {
  std::int64_t B = 4, H = 4, T = 1024, D = 32;
  int b = 64;
  std::int64_t rounds = 15;
};

// LibTorch's own allocator, counting the bytes that live.
class CountingAllocator : public at::Allocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    auto* held = new Held{c10::GetDefaultCPUAllocator()->allocate(bytes), bytes, this};
    live_ += bytes;
    peak_ = std::max(peak_.load(), live_.load());
    return {held->data.get(), held, &release, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::size_t live() const { return live_; }
  // The most that lived since the last call.
  std::size_t take_peak() { return peak_.exchange(live_); }

 private:
  struct Held {
    at::DataPtr data;
    std::size_t bytes;
    CountingAllocator* owner;
  };
  static void release(void* context) {
    const auto* held = static_cast<Held*>(context);
    held->owner->live_ -= held->bytes;
    delete held;
  }
  std::atomic<std::size_t> live_{0}, peak_{0};
};

CountingAllocator& allocator() {
  static auto* counting = new CountingAllocator;  // tensors may outlive main
  return *counting;
}

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).set_requires_grad(true); }

// As a layer makes them: heads are views of [B, T, H, D].
at::Tensor heads(const Size& s) {
  return at::randn({s.B, s.T, s.H, s.D}).transpose(1, 2).set_requires_grad(true);
}

// One way to compute something, and what its gradient is taken of.
struct Contender {
  std::string name;
  std::function<at::Tensor()> out;
  std::vector<at::Tensor> leaves;
};

struct Measured {
  double ms = 0, mib = 0;
};

// Medians over rounds in which each contender has one turn.
std::vector<Measured> measure(const std::vector<Contender>& contenders, std::int64_t rounds) {
  constexpr int kWarmUp = 3;
  std::vector<std::vector<double>> times(contenders.size());
  std::vector<Measured> result(contenders.size());
  for (std::int64_t round = 0; round < kWarmUp + rounds; ++round) {
    for (std::size_t c = 0; c < contenders.size(); ++c) {
      const std::size_t live_before = allocator().live();
      allocator().take_peak();
      const auto start = std::chrono::steady_clock::now();
      {
        const at::Tensor out = contenders[c].out();
        torch::autograd::grad({out}, contenders[c].leaves, {at::ones_like(out)}, false, false,
                              true);
      }
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - start;
      if (round >= kWarmUp) times[c].push_back(elapsed.count());
      result[c].mib = static_cast<double>(allocator().take_peak() - live_before) / (1 << 20);
    }
  }
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    std::nth_element(times[c].begin(), times[c].begin() + rounds / 2, times[c].end());
    result[c].ms = times[c][static_cast<std::size_t>(rounds / 2)];
  }
  return result;
}

// A mechanism, its parameters and inputs.
struct Case {
  Case(const configs::Mechanism& config, const Size& s)
      : group(make_single_group()), parameters(1, at::kFloat) {
    const MechanismShape shape{.channels = s.H * s.D,
                               .heads = s.H,
                               .head_dim = s.D,
                               .sequence_length = s.T,
                               .causal = true};
    mechanism = make_mechanism(config, shape, "attention", parameters, {*group, *group, *group});
    in.q_BHLD = heads(s);
    in.k_BHSD = heads(s);
    in.v_BHSD = heads(s);
    in.x_q_BLC = in.x_kv_BSC = leaf({s.B, s.T, s.H * s.D});
    leaves = {in.q_BHLD, in.k_BHSD, in.v_BHSD, in.x_q_BLC};
    for (const Parameter& parameter : parameters.list()) leaves.push_back(parameter.value);
  }
  std::unique_ptr<Group> group;
  Parameters parameters;
  std::unique_ptr<Mechanism> mechanism;
  AttentionInput in;
  std::vector<at::Tensor> leaves;
};

void compare_mechanisms(const Size& s) {
  std::vector<std::pair<std::string, configs::Mechanism>> configs(3);
  configs[0].first = "dense";
  configs[0].second.mutable_dense();
  for (const int look_back : {0, 1}) {
    auto& [name, config] = configs[static_cast<std::size_t>(look_back) + 1];
    name = fmt::format("block_local look_back {}", look_back);
    config.mutable_block_local()->set_block(s.b);
    config.mutable_block_local()->set_look_back(look_back);
  }
  const auto* modes = configs::SinkhornAttention::CausalBalance_descriptor();
  for (int i = 0; i < modes->value_count(); ++i) {
    auto& [name, config] = configs.emplace_back();
    name = fmt::format("sinkhorn {}", modes->value(i)->name());
    config.mutable_sinkhorn()->set_block(s.b);
    config.mutable_sinkhorn()->set_causal_balance(
        static_cast<configs::SinkhornAttention::CausalBalance>(modes->value(i)->number()));
  }
  std::vector<std::unique_ptr<Case>> cases;
  std::vector<Contender> contenders;
  for (const auto& [name, config] : configs) {
    const Case* each = cases.emplace_back(std::make_unique<Case>(config, s)).get();
    contenders.push_back(
        {name, [each] { return each->mechanism->forward(each->in).out_BHLD; }, each->leaves});
    contenders.push_back({name + ", reference",
                          [each] { return each->mechanism->reference(each->in).out_BHLD; },
                          each->leaves});
  }
  const std::vector<Measured> measured = measure(contenders, s.rounds);
  fmt::print("{:<26} {:>10} {:>10} {:>12} {:>12}\n", "mechanism", "ms", "x dense", "x reference",
             "MiB (ref.)");
  for (std::size_t c = 0; c < contenders.size(); c += 2) {
    const Measured &fast = measured[c], &reference = measured[c + 1];
    fmt::print("{:<26} {:>10.2f} {:>10.2f} {:>12.2f} {:>5.1f} ({:.1f})\n", contenders[c].name,
               fast.ms, measured[0].ms / fast.ms, reference.ms / fast.ms, fast.mib, reference.mib);
  }
}

// q, k, v of a layer in blocks, and for Sinkhorn attention block weights to sort k and v by.
struct BlockCase {
  std::string name;
  bool sorts = false;
  std::int64_t look_back = 0;
};

void compare_paths(const BlockCase& block_case, const Size& s) {
  const at::Tensor q = heads(s), k = heads(s), v = heads(s);
  const std::int64_t N = s.T / s.b;
  const at::Tensor weights_BHNN =
      at::rand({s.B, s.H, N, N}).tril(-1).div_(static_cast<double>(N)).set_requires_grad(true);
  std::vector<at::Tensor> leaves{q, k, v};
  if (block_case.sorts) leaves.push_back(weights_BHNN);
  const at::Tensor has_sorted = (at::arange(N) > 0).view({1, 1, N, 1, 1});
  const auto contender = [&](const char* name, BlockPath path) {
    return Contender{name,
                     [&, path] {
                       const auto fold = [&](const at::Tensor& x) {
                         return x.unflatten(2, {N, s.b});
                       };
                       BlockAttention attention;
                       attention.q_BHNbD = fold(q);
                       KeyBlocks own;
                       own.k_BHNbD = fold(k);
                       own.v_BHNbD = fold(v);
                       own.first_offset = -block_case.look_back;
                       own.causal = true;
                       own.legal_BHNbb.resize(static_cast<std::size_t>(block_case.look_back) + 1);
                       if (block_case.sorts) {
                         KeyBlocks sorted;
                         if (path == BlockPath::kFused) {
                           const std::vector<at::Tensor> mixes =
                               mix_lower_blocks(weights_BHNN, {own.k_BHNbD, own.v_BHNbD}, -1);
                           sorted.k_BHNbD = mixes[0];
                           sorted.v_BHNbD = mixes[1];
                         } else {
                           sorted.k_BHNbD = mix_blocks(weights_BHNN, own.k_BHNbD);
                           sorted.v_BHNbD = mix_blocks(weights_BHNN, own.v_BHNbD);
                         }
                         sorted.legal_BHNbb = {has_sorted};
                         attention.keys.push_back(sorted);
                       }
                       attention.keys.push_back(own);
                       return attend_in_blocks(attention, path);
                     },
                     leaves};
  };
  const std::vector<Measured> measured =
      measure({contender("fused", BlockPath::kFused), contender("composed", BlockPath::kComposed),
               contender("eager", BlockPath::kReference)},
              s.rounds);
  fmt::print("{:<26} {:>8.2f} {:>10.2f} {:>8.2f} {:>12.2f} {:>9.2f}   {:.1f}, {:.1f}, {:.1f}\n",
             block_case.name, measured[0].ms, measured[1].ms, measured[2].ms,
             measured[1].ms / measured[0].ms, measured[2].ms / measured[0].ms, measured[0].mib,
             measured[1].mib, measured[2].mib);
}

void run(const Size& s) {
  fmt::print("forward + backward, medians of {}: B={} H={} T={} D={} b={}, {} thread(s)\n",
             s.rounds, s.B, s.H, s.T, s.D, s.b, at::get_num_threads());
  compare_mechanisms(s);
  if (s.T % s.b != 0) return;
  fmt::print("\n{:<26} {:>8} {:>10} {:>8} {:>12} {:>9}   MiB of the three\n", "attention in blocks",
             "fused ms", "composed", "eager", "x composed", "x eager");
  compare_paths({"own block"}, s);
  compare_paths({"own and previous block", false, 1}, s);
  compare_paths({"own and sorted block", true}, s);
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
  size.rounds = argument(7, size.rounds);
  c10::SetCPUAllocator(&birkhoff::allocator(), /*priority=*/1);
  birkhoff::run(size);
}
