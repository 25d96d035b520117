#include "launcher/plan/trial.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "launcher/measure/machine_speed.h"
#include "launcher/measure/report.h"
#include "launcher/plan/smaller_config.h"
#include "models/embeddings/vocabulary_parts.h"
#include "models/transformer/layers.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

void set_only(google::protobuf::RepeatedPtrField<configs::Attention>& all,
              const configs::Attention& one) {
  all.Clear();
  *all.Add() = one;
}

// A pass has parameters and gradients. The moments of a step's optimizer are as large again.
constexpr int kPass = 1, kStep = 2;

// So few ids that the head is small compared with a layer.
// At least one for each rank of mesh.tensor, and one in each tail of adaptive softmax.
std::int64_t few_ids(const configs::Config& config, std::int64_t vocabulary) {
  const auto& cutoff = config.model().adaptive_softmax().cutoff();
  const int last_tail = cutoff.empty() ? 0 : cutoff[cutoff.size() - 1];
  return std::min<std::int64_t>(vocabulary, std::max({16, config.mesh().tensor(), last_tail + 1}));
}

std::int64_t value_bytes(const configs::Train& train) {
  return train.precision() == configs::Train::fp64 ? 8 : 4;
}

// The other ranks of a machine: threads that train until this object's end.
class Neighbours {
 public:
  Neighbours(const configs::Config& config, std::int64_t vocabulary, int count) {
    const int threads = at::get_num_threads();
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([this, config, vocabulary, threads] {
        at::set_num_threads(threads);  // LibTorch keeps this number for each thread
        SyntheticTraining training(config, vocabulary, at::kCPU);
        for (++ready_; !stop_;) training.timed_parts();
      });
    }
    while (ready_ < count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~Neighbours() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

 private:
  std::atomic<int> ready_ = 0;
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> threads_;
};

// Times steps, and the machine between them.
class Rounds {
 public:
  Rounds(const configs::Config& config, int count, int neighbours)
      : count_(count),
        neighbours_(neighbours),
        machine_(product_dtype(config.train().precision()), at::kCPU) {}

  // Medians of a step's parts.
  PartTimes time(const configs::Config& config, std::int64_t vocabulary) {
    SyntheticTraining training(config, vocabulary, at::kCPU);
    training.timed_parts();  // allocates memory that later steps reuse
    const Neighbours others(config, vocabulary, neighbours_);
    std::vector<double> forward, backward, optimizer;
    for (int round = 0; round < count_; ++round) {
      const PartTimes seconds = training.timed_parts();
      forward.push_back(seconds.forward);
      backward.push_back(seconds.backward);
      optimizer.push_back(seconds.optimizer);
      machine_.measure(watch_);
    }
    return {median(forward), median(backward), median(optimizer)};
  }

  const MachineSpeed& machine() const { return machine_; }

 private:
  static at::ScalarType product_dtype(configs::Train::Precision precision) {
    if (precision == configs::Train::fp64) return at::kDouble;
    return precision == configs::Train::fp32 ? at::kFloat : at::kBFloat16;
  }

  const int count_, neighbours_;
  const Stopwatch watch_{at::kCPU};
  MachineSpeed machine_;
};

}  // namespace

Trial::Trial(const configs::Config& config, std::int64_t vocabulary, std::int64_t micro_batch,
             TrialLimits limits)
    : config_(config), vocabulary_(vocabulary), micro_batch_(micro_batch), limits_(limits) {
  const configs::Model& model = config.model();
  const Shape one{1, whole().length};
  flops_of_rest_ = size_of_model(without_layers(one), vocabulary).flops;
  const ModelSize all = size_of_model(whole_model(one), vocabulary);
  flops_of_layers_ = all.flops - flops_of_rest_;
  elements_ = all.elements;
  const configs::Encoder& encoder = model.encoder();
  for (int i = 0; model.has_encoder() && i < encoder.layers(); ++i) {
    add_layer(/*of_sources=*/true, encoder.attention(i % encoder.attention_size()), {});
  }
  for (int i = 0; i < model.layers(); ++i) {
    add_layer(/*of_sources=*/false, model.attention(i % model.attention_size()),
              model.has_encoder() ? encoder.cross_attention(i % encoder.cross_attention_size())
                                  : configs::Attention());
  }
  const std::int64_t length = trial_length(config);
  shapes_ = {{1, length}, {2, length}};
  if (length < one.length) shapes_.push_back({1, 2 * length});
}

void Trial::add_layer(bool of_sources, const configs::Attention& attention,
                      const configs::Attention& cross_attention) {
  const std::string text = attention.SerializeAsString(),
                    cross_text = cross_attention.SerializeAsString();
  auto kind = std::ranges::find_if(kinds_, [&](const Kind& each) {
    return each.of_sources == of_sources && each.attention.SerializeAsString() == text &&
           each.cross_attention.SerializeAsString() == cross_text;
  });
  if (kind == kinds_.end()) {
    kind = kinds_.insert(kind, {of_sources, attention, cross_attention, /*layers=*/0, {}});
    const Shape one{1, whole().length};
    const std::int64_t few = few_ids(config_, vocabulary_);
    const ModelSize with = size_of_model(part(*kind, 1, one), few),
                    without = size_of_model(part(*kind, 0, one), few);
    kind->size = {with.flops - without.flops, with.elements - without.elements};
  }
  ++kind->layers;
  kind_of_layer_.push_back(static_cast<std::size_t>(kind - kinds_.begin()));
}

configs::Config Trial::whole_model(Shape shape) const {
  return smaller_config(config_, shape.sequences, shape.length);
}

configs::Config Trial::without_layers(Shape shape) const {
  configs::Config config = whole_model(shape);
  configs::Model& model = *config.mutable_model();
  model.set_layers(0);
  if (model.has_encoder()) model.mutable_encoder()->set_layers(0);
  return config;
}

configs::Config Trial::part(const Kind& kind, std::int64_t layers, Shape shape) const {
  configs::Config config = config_;
  configs::Model& model = *config.mutable_model();
  configs::Encoder& encoder = *model.mutable_encoder();
  if (kind.of_sources) {
    model.set_layers(1);
    encoder.set_layers(static_cast<int>(layers));
    set_only(*encoder.mutable_attention(), kind.attention);
  } else {
    model.set_layers(static_cast<int>(layers));
    set_only(*model.mutable_attention(), kind.attention);
    encoder.set_layers(0);
    set_only(*encoder.mutable_cross_attention(), kind.cross_attention);
  }
  if (!config_.model().has_encoder()) model.clear_encoder();
  return smaller_config(config, shape.sequences, shape.length);
}

const Trial::Kind* Trial::decoder_tried_with(const Kind& kind) const {
  if (!kind.of_sources) return nullptr;
  const auto first = std::ranges::find(kinds_, false, &Kind::of_sources);
  return first == kinds_.end() ? nullptr : &*first;
}

std::int64_t Trial::layers_of_stack(const Kind& kind) const {
  const configs::Model& model = config_.model();
  return kind.of_sources ? model.encoder().layers() : model.layers();
}

std::int64_t Trial::tokens_of(const Kind& kind, Shape shape) const {
  return crosses(kind) ? shape.tokens() * target_length(config_) / whole().length : shape.tokens();
}

double Trial::stream_bytes(const Kind& kind, Shape shape) const {
  return static_cast<double>(tokens_of(kind, shape) * config_.model().channels() *
                             value_bytes(config_.train()));
}

double Trial::bytes_of_state(double elements, int states) const {
  return 2 * states * elements * static_cast<double>(value_bytes(config_.train()));
}

// The norms and matrices of a layer read and write about 8 times the channels, 4 times the width of
// all heads, and 4 times the feed-forward width; those of cross-attention 4 times the channels, and
// 4 times the width of all heads, half of it at the sources.
double Trial::kept_by_usual_layer(const Kind& kind, Shape shape) const {
  const configs::Model& model = config_.model();
  const auto of_heads = static_cast<double>(model.heads() * head_width(model));
  const bool crosses = this->crosses(kind);
  double values = static_cast<double>(tokens_of(kind, shape)) *
                  ((crosses ? 12.0 : 8.0) * model.channels() + (crosses ? 6 : 4) * of_heads +
                   4.0 * model.feed_forward());
  if (crosses) values += static_cast<double>(shape.tokens()) * 2 * of_heads;
  return static_cast<double>(value_bytes(config_.train())) * values;
}

// The backward pass allocates as much as a layer keeps.
double Trial::most_bytes(const Kind& kind, std::int64_t layers, Shape shape, int states) const {
  const Kind* const decoder = decoder_tried_with(kind);
  return static_cast<double>(layers) * bytes_of_state(kind.size.elements, states) +
         static_cast<double>(layers + 1) * kept_by_usual_layer(kind, shape) +
         (decoder != nullptr ? most_bytes(*decoder, 1, shape, states) : 0);
}

bool Trial::layers_fit() const {
  return std::ranges::all_of(kinds_, [&](const Kind& kind) {
    return std::max(most_bytes(kind, 1, shapes_[1], kPass),
                    most_bytes(kind, 2, shapes_[0], kPass)) <= limits_.bytes;
  });
}

// Bytes that do not grow with the number of sequences do not grow with their length. The bytes per
// token may grow linearly with the length.
double Trial::extrapolate(const std::vector<double>& values, Shape to) const {
  const auto length = static_cast<double>(shapes_[0].length);
  const double sequence = values[1] - values[0], constant = values[0] - sequence;
  double token = sequence / length;
  if (values.size() > 2) {
    const double of_longer = (values[2] - constant) / (2 * length);
    token += (of_longer - token) * (static_cast<double>(to.length) - length) / length;
  }
  return constant + token * static_cast<double>(to.tokens());
}

Trial::LayerBytes Trial::try_layer(const Kind& kind) const {
  const std::int64_t few = few_ids(config_, vocabulary_);
  const auto of_layers = [&](std::int64_t layers, Shape shape) {
    configs::Config config = part(kind, layers, shape);
    config.mutable_train()->set_recompute(false);
    return config;
  };
  // The meta device lacks operations of the decoder's layer.
  const c10::Device device = kind.of_sources ? at::kCPU : at::kMeta;
  std::vector<double> kept, temporary, evaluation;
  std::unique_ptr<CountedModel> one;
  for (const Shape& shape : shapes_) {
    if (shape.sequences == 1) {
      one.reset();  // before there is another
      one = std::make_unique<CountedModel>(of_layers(1, shape), few, at::kCPU);
    }
    const CountedModel::Bytes bytes = one->train(shape.sequences);
    kept.push_back(bytes.kept);
    temporary.push_back(bytes.temporary());
    evaluation.push_back(one->evaluate(shape.sequences));
  }
  one.reset();
  // Before the extrapolation, because a decoder's layer may be too large to try on whole sequences.
  std::vector<double> without;
  for (const Shape& shape : shapes_) {
    without.push_back(CountedModel(of_layers(0, shape), few, device).train(shape.sequences).kept);
    kept[without.size() - 1] -= without.back();
  }
  LayerBytes layer;
  layer.first = layer.next = extrapolate(kept, whole());
  layer.temporary = extrapolate(temporary, whole());
  layer.evaluation = extrapolate(evaluation, evaluated());
  const auto larger = [&](Shape shape) {
    return static_cast<double>(shape.tokens()) / static_cast<double>(shapes_[0].tokens());
  };
  if (crosses(kind)) {
    configs::Config recomputed = of_layers(1, shapes_[0]);
    recomputed.mutable_train()->set_recompute(true);
    layer.of_encoder = larger(whole()) * (CountedModel(recomputed, few, at::kCPU).train(1).kept -
                                          without[0] - stream_bytes(kind, shapes_[0]));
  }
  if (layers_of_stack(kind) == 1) return layer;
  // The additional bytes of a second layer are proportional to the tokens.
  CountedModel two(of_layers(2, shapes_[0]), few, at::kCPU);
  const CountedModel::Bytes bytes = two.train(1);
  layer.next += larger(whole()) * (bytes.kept - without[0] - 2 * kept[0]);
  layer.temporary += larger(whole()) * (bytes.temporary() - temporary[0]);
  layer.evaluation += larger(evaluated()) * (two.evaluate(1) - evaluation[0]);
  return layer;
}

Trial::LayerBytes Trial::usual_layer(const Kind& kind) const {
  const double kept = kept_by_usual_layer(kind, whole());
  return {.first = kept,
          .next = kept,
          .temporary = kept,
          .evaluation = kept_by_usual_layer(kind, evaluated()),
          .of_encoder = 0};
}

bool Trial::whole_fits(const TrialMemory& bytes, int states, int copies) const {
  return (bytes_of_state(elements_, states) +
          std::max(bytes.layers + bytes.rest + bytes.temporary, bytes.evaluation)) *
                 copies <=
             limits_.bytes &&
         3 * static_cast<double>(std::max(micro_batch_, evaluated().sequences)) *
                 (flops_of_layers_ + flops_of_rest_) <=
             limits_.flops;
}

TrialMemory Trial::memory(bool recompute) {
  TrialMemory bytes = extrapolated(recompute);
  if (whole_fits(bytes, kPass, 1)) {
    configs::Config config = whole_model(whole());
    config.mutable_train()->set_recompute(recompute);
    CountedModel model(config, vocabulary_, at::kCPU);
    const CountedModel::Bytes all = model.train(micro_batch_);
    bytes.layers = all.kept - bytes.rest;
    bytes.temporary = all.temporary();
    bytes.evaluation = model.evaluate(evaluated().sequences);
    tried_.clear();
  }
  memory_[recompute] = bytes;
  return bytes;
}

TrialMemory Trial::extrapolated(bool recompute) {
  if (layers_.empty()) {
    for (const Kind& kind : kinds_) {
      layers_.push_back(layers_fit() ? try_layer(kind) : usual_layer(kind));
    }
  }
  const configs::Model& model = config_.model();
  const std::int64_t few = few_ids(config_, vocabulary_);
  const configs::Config config_of_rest = without_layers(whole());
  CountedModel rest(config_of_rest, vocabulary_, at::kMeta);
  const CountedModel::Bytes of_rest = rest.train(micro_batch_);
  const bool halves = config_.train().precision() == configs::Train::bf16 ||
                      config_.train().precision() == configs::Train::fp16;
  TrialMemory bytes;
  bytes.rest = of_rest.kept;
  bytes.evaluation = rest.evaluate(evaluated().sequences);
  double peak = 0;  // while the gradients of layers are computed
  const Kind* before = nullptr;
  for (const std::size_t number : kind_of_layer_) {
    const Kind& kind = kinds_[number];
    LayerBytes layer = layers_[number];
    // A layer that is recomputed holds its input to its end. Without recomputation cross-attention
    // frees it.
    if (recompute && crosses(kind)) {
      layer.temporary += stream_bytes(kind, whole());
      layer.evaluation += stream_bytes(kind, evaluated());
    }
    bytes.evaluation = std::max(bytes.evaluation, layer.evaluation);
    // A layer keeps its input, and in its own backward pass also its output and the rest.
    if (recompute) {
      const double stream = stream_bytes(kind, whole());
      layer.temporary += layer.first - layer.of_encoder - stream + stream / (halves ? 2 : 1);
      layer.first = stream + layer.of_encoder;
      layer.next = stream;
    }
    const bool is_first = before == nullptr || before->of_sources != kind.of_sources;
    bytes.layers += is_first ? layer.first : layer.next;
    before = &kind;
    peak = std::max(peak, bytes.layers + layer.temporary);
  }
  // The logits are freed by then.
  peak += CountedModel(config_of_rest, few, at::kMeta).train(micro_batch_).kept;
  // The output's gradient of a tied table is kept until the embedding's is computed.
  if (model.tie_embeddings() && make_task(config_)->targets_are_text()) {
    peak += static_cast<double>((vocabulary_ - few) *
                                vocabulary_parts(model, vocabulary_).back().width *
                                value_bytes(config_.train()));
  }
  bytes.temporary = std::max(peak, bytes.layers + of_rest.peak) - bytes.layers - bytes.rest;
  const std::size_t layers = kind_of_layer_.size();
  tried_ =
      fmt::format("{} of {} layers and {} of {} tokens of a sequence",
                  std::min<std::size_t>(2, layers), layers, shapes_.back().length, whole().length);
  return bytes;
}

// The longest sequences that the limits allow, then the largest number of them.
Trial::Shape Trial::timed_shape(int copies) const {
  const auto fits = [&](Shape shape) {
    const double share = static_cast<double>(shape.tokens()) / static_cast<double>(whole().length);
    return shape.length <= whole().length && shape.sequences <= micro_batch_ &&
           std::ranges::all_of(kinds_, [&](const Kind& kind) {
             const Kind* const decoder = decoder_tried_with(kind);
             const double flops = kind.size.flops + (decoder != nullptr ? decoder->size.flops : 0);
             return 3 * flops * share <= limits_.flops &&
                    most_bytes(kind, 1, shape, kStep) * copies <= limits_.bytes;
           });
  };
  Shape shape = shapes_[0];
  while (fits({1, 2 * shape.length})) shape.length *= 2;
  while (fits({2 * shape.sequences, shape.length})) shape.sequences *= 2;
  return shape;
}

// The largest number of ids that the limits allow, but more than a few.
std::int64_t Trial::timed_ids(Shape shape, int copies) const {
  std::int64_t ids = vocabulary_;
  const auto fits = [&] {
    const configs::Config rest = without_layers(shape);
    const ModelSize size = size_of_model(rest, ids);
    return 3 * static_cast<double>(shape.sequences) * size.flops <= limits_.flops &&
           (bytes_of_state(size.elements, kStep) +
            CountedModel(rest, ids, at::kMeta).train(shape.sequences).peak) *
                   copies <=
               limits_.bytes / 2;  // parameters exist twice while they are made
  };
  while (ids / 2 > few_ids(config_, vocabulary_) && !fits()) ids /= 2;
  return ids;
}

TrialTimes Trial::times(int rounds, int neighbours) {
  require(layers_fit() && memory_.contains(config_.train().recompute()),
          "times() needs a memory that layers were tried for");
  int copies = 1 + neighbours;
  for (const Kind& kind : kinds_) {
    const double most = limits_.bytes / most_bytes(kind, 1, shapes_[0], kStep);
    if (most < copies) copies = std::max(1, static_cast<int>(most));
  }
  TrialTimes times{.step = {}, .neighbours = copies - 1};
  Rounds timed(config_, rounds, times.neighbours);
  if (whole_fits(memory_.at(config_.train().recompute()), kStep, copies)) {
    times.step = timed.time(whole_model(whole()), vocabulary_);
    tried_.clear();
  } else {
    const Shape shape = timed_shape(copies);
    const std::int64_t few = few_ids(config_, vocabulary_), ids = timed_ids(shape, copies);
    // Adds the difference between `larger` and `smaller`, which noise may make negative.
    const auto add = [&](double passes, double updates, const PartTimes& larger,
                         const PartTimes& smaller) {
      const auto difference = [&](double PartTimes::*part) {
        return std::max(0.0, larger.*part - smaller.*part);
      };
      times.step.forward += passes * difference(&PartTimes::forward);
      times.step.backward += passes * difference(&PartTimes::backward);
      times.step.optimizer += updates * difference(&PartTimes::optimizer);
    };
    const configs::Config rest = without_layers(shape);
    const double tokens =
        static_cast<double>(whole().tokens()) / static_cast<double>(shape.tokens());
    const PartTimes with_few = timed.time(rest, few);
    add(tokens, 1, with_few, {});
    if (ids > few) {
      const double share = static_cast<double>(vocabulary_ - few) / static_cast<double>(ids - few);
      add(tokens * share, share, timed.time(rest, ids), with_few);
    }
    // The decoder's kinds first: its first kind is also what an encoder's layers are tried with.
    PartTimes of_decoder;
    for (auto kind = kinds_.rbegin(); kind != kinds_.rend(); ++kind) {
      const configs::Config one = part(*kind, 1, shape), none = part(*kind, 0, shape);
      const double flops = static_cast<double>(shape.sequences) *
                           (size_of_model(one, few).flops - size_of_model(none, few).flops),
                   all = static_cast<double>(kind->layers * micro_batch_) * kind->size.flops;
      const PartTimes with_one = timed.time(one, few);
      add(all / flops, static_cast<double>(kind->layers), with_one,
          kind->of_sources ? of_decoder : with_few);
      if (!kind->of_sources) of_decoder = with_one;
    }
    tried_ = fmt::format("1 of {} layers, {} of {} tokens and {} of {} token ids",
                         kind_of_layer_.size(), shape.tokens(), whole().tokens(), ids, vocabulary_);
  }
  times.product_flops = timed.machine().flops_per_second();
  times.copy_bytes = timed.machine().bytes_per_second();
  return times;
}

}  // namespace birkhoff
