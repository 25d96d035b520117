// Sinkhorn attention's share of a training step: CPU time of forward + backward of a causal
// language model (6 layers, 384 channels, 6 heads, b = 64, n_it = 5, fp32), and of only its
// mechanism on inputs of the same sizes. Medians of alternating rounds. One thread.
// Usage: attention_share [T B causal_balance rounds], by default 1024 4 prefix 3.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <vector>

#include "attention/mechanism.h"
#include "cluster/base/cpu.h"
#include "cluster/base/instruction_set.h"
#include "configs/loader/config_io.h"
#include "configs/schema/attention.pb.h"
#include "configs/schema/config.pb.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kLayers = 6, kHeads = 6, kHeadDim = 64, kChannels = kHeads * kHeadDim;
constexpr std::int64_t kVocabulary = 65;

// CPU milliseconds of this thread; other programs do not count.
double processor_ms(const std::function<void()>& work) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
  };
  const double start = now();
  work();
  return now() - start;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void backward(const at::Tensor& out, const at::Tensor& d_out,
              const std::vector<at::Tensor>& leaves) {
  torch::autograd::grad({out}, leaves, {d_out}, false, false, true);
}

std::vector<at::Tensor> values_of(const Parameters& parameters) {
  std::vector<at::Tensor> values;
  for (const Parameter& parameter : parameters.list()) values.push_back(parameter.value);
  return values;
}

void run(std::int64_t T, std::int64_t B, const std::string& balance, std::int64_t rounds) {
  const configs::Config config = parse_config(
      fmt::format("task {{ language_model {{}} }} data {{ corpus: 'none' sequence_length: {} }} "
                  "model {{ layers: {} channels: {} heads: {} attention {{ group {{ mechanism {{ "
                  "sinkhorn {{ block: 64 causal_balance: {} }} }} }} }} }}",
                  T, kLayers, kChannels, kHeads, balance),
      "attention_share", {});
  const std::unique_ptr<Model> model = make_model(config, kVocabulary, at::kCPU);
  const std::vector<at::Tensor> weights = values_of(model->parameters());
  std::int64_t num_weights = 0;
  for (const at::Tensor& weight : weights) num_weights += weight.numel();
  Batch batch;
  for (const char* name : {"inputs", "targets"}) {
    batch.fields[name] = at::randint(kVocabulary, {B, T}, at::kLong);
  }
  batch.fields["mask"] = at::ones({B, T}, at::kByte);
  batch.sample_ids_B = at::arange(B, at::kLong);

  Parameters parameters(1, at::kFloat);
  const std::unique_ptr<Mechanism> mechanism =
      make_mechanism(config.model().attention(0).group(0).mechanism(),
                     {.channels = kChannels,
                      .heads = kHeads,
                      .head_dim = kHeadDim,
                      .sequence_length = T,
                      .causal = true},
                     "attention", parameters);
  const auto heads = [&] {  // views of [B, T, H, D], as in a layer
    return at::randn({B, T, kHeads, kHeadDim}).transpose(1, 2).set_requires_grad(true);
  };
  AttentionInput in;
  in.q_BHLD = heads();
  in.k_BHSD = heads();
  in.v_BHSD = heads();
  in.x_q_BLC = in.x_kv_BSC = at::randn({B, T, kChannels}).set_requires_grad(true);
  std::vector<at::Tensor> leaves = values_of(parameters);
  leaves.insert(leaves.end(), {in.q_BHLD, in.k_BHSD, in.v_BHSD, in.x_q_BLC});

  // The gradient that the layer's next product would return. It is not part of attention's work.
  const at::Tensor d_out = at::ones_like(mechanism->attend(in, Path::kFused).out_BHLD),
                   d_loss = at::ones({});

  std::vector<double> step, attention;
  for (std::int64_t round = -1; round < rounds; ++round) {  // the first is warm-up
    const double of_step =
        processor_ms([&] { backward(model->loss_sums(batch, {}).loss, d_loss, weights); });
    const double of_attention = processor_ms(
        [&] { backward(mechanism->attend(in, Path::kFused).out_BHLD, d_out, leaves); });
    if (round < 0) continue;
    step.push_back(of_step);
    attention.push_back(of_attention);
  }
  const double share = static_cast<double>(kLayers) * median(attention) / median(step);
  fmt::print(
      "{}, T={}, B={}, {} parameters: step {:.0f} ms, attention {} x {:.1f} ms, share {:.1f} %, "
      "{}\n",
      balance, T, B, num_weights, median(step), kLayers, median(attention), 100 * share,
      name_of(instruction_set()));
}

}  // namespace
}  // namespace birkhoff

int main(int argc, char** argv) {
  const auto argument = [&](int i, std::int64_t otherwise) {
    return i < argc ? std::atoll(argv[i]) : otherwise;
  };
  birkhoff::compute_on_cpu(1);
  birkhoff::run(argument(1, 1024), argument(2, 4), argc > 3 ? argv[3] : "prefix", argument(4, 3));
}
