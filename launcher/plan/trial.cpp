#include "launcher/plan/trial.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>

#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/schema/options.pb.h"
#include "launcher/measure/machine_speed.h"
#include "launcher/measure/report.h"
#include "models/embeddings/vocabulary_parts.h"
#include "models/transformer/layers.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Calls visit(message, field, value) for each int32 of a message and of those inside it.
template <typename Visit>
void visit_integers(Message& message, const Visit& visit) {
  const auto& reflection = *message.GetReflection();
  for (const FieldDescriptor* field : set_fields(message)) {
    const bool is_integer = field->cpp_type() == FieldDescriptor::CPPTYPE_INT32;
    if (field->message_type() == nullptr) {
      if (is_integer && !field->is_repeated())
        visit(message, *field, reflection.GetInt32(message, field));
    } else if (field->is_repeated()) {
      for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
        visit_integers(*reflection.MutableRepeatedMessage(&message, field, i), visit);
      }
    } else {
      visit_integers(*reflection.MutableMessage(&message, field), visit);
    }
  }
}

// In tokens.
std::int64_t unit_of_reach(const Message& message) {
  return field_with(message, configs::block_length) != nullptr ? block_length_of(message) : 1;
}

// The minimum number of tokens of a sequence on which layers can be tried: whole blocks, and at
// least twice the maximum that a query sees. data.sequence_length if that is less than twice as
// long.
std::int64_t trial_length(const configs::Config& config) {
  const std::int64_t full = config.data().sequence_length();
  std::int64_t unit = 4;     // a point cloud transformer halves its sets twice
  std::int64_t least = 256;  // products of fewer rows may take another algorithm
  const auto hold_two = [&](std::int64_t tokens) { least = std::max(least, 2 * tokens); };
  const auto consider = [&](const Message& message, const FieldDescriptor& field,
                            std::int64_t value) {
    if (value == 0) return;
    if (field.options().GetExtension(configs::block_length)) unit = std::lcm(unit, value);
    if (field.options().GetExtension(configs::parts_of_sequence)) hold_two(full / value);
    if (field.options().GetExtension(configs::reach)) hold_two(value * unit_of_reach(message));
  };
  configs::Model model = config.model();
  configs::Task task = config.task();
  visit_integers(model, consider);
  visit_integers(task, consider);
  hold_two(unit);
  least = (least + unit - 1) / unit * unit;
  return 2 * least < full ? least : full;
}

// `config`, resolved, for one rank on the CPU with `layers` layers of `attention` (null: as they
// are) and `sequences` sequences of `length` tokens. Fields with (parts_of_sequence) scale with the
// length. fp16 becomes bf16, and virtual shards and CUDA graphs are left out.
configs::Config smaller_config(const configs::Config& config, const configs::Attention* attention,
                               std::int64_t layers, std::int64_t sequences, std::int64_t length) {
  const std::int64_t full = config.data().sequence_length();
  configs::Config part = config;
  part.set_device(configs::Config::cpu);
  part.mutable_data()->set_sequence_length(static_cast<int>(length));
  part.mutable_model()->set_layers(static_cast<int>(layers));
  if (attention != nullptr) {
    part.mutable_model()->clear_attention();
    *part.mutable_model()->add_attention() = *attention;
  }
  for (configs::Attention& each : *part.mutable_model()->mutable_attention()) {
    visit_integers(each, [&](Message& message, const FieldDescriptor& field, std::int64_t value) {
      if (!field.options().GetExtension(configs::parts_of_sequence)) return;
      message.GetReflection()->SetInt32(&message, &field,
                                        static_cast<int>((value * length + full - 1) / full));
    });
  }
  configs::Train& train = *part.mutable_train();
  train.set_global_batch(static_cast<int>(sequences));
  train.set_micro_batch(0);
  train.set_cuda_graph(false);
  train.mutable_invariant()->set_shards(0);
  if (train.precision() == configs::Train::fp16) train.set_precision(configs::Train::bf16);
  return part;
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
  const std::int64_t few = few_ids(config, vocabulary);
  flops_of_rest_ = size_of_model(part(nullptr, 0, one), vocabulary).flops;
  const ModelSize all = size_of_model(part(nullptr, model.layers(), one), vocabulary);
  flops_of_layers_ = all.flops - flops_of_rest_;
  elements_ = all.elements;
  for (int i = 0; i < model.layers(); ++i) {
    const configs::Attention& attention = model.attention(i % model.attention_size());
    const std::string text = attention.SerializeAsString();
    const auto same = [&](const Kind& kind) { return kind.attention.SerializeAsString() == text; };
    auto kind = std::ranges::find_if(kinds_, same);
    if (kind == kinds_.end()) {
      kind = kinds_.insert(kind, {.attention = attention, .layers = 0, .size = {}});
      const ModelSize with = size_of_model(part(&*kind, 1, one), few),
                      without = size_of_model(part(&*kind, 0, one), few);
      kind->size = {with.flops - without.flops, with.elements - without.elements};
    }
    ++kind->layers;
    kind_of_layer_.push_back(static_cast<std::size_t>(kind - kinds_.begin()));
  }
  const std::int64_t length = trial_length(config);
  shapes_ = {{1, length}, {2, length}};
  if (length < one.length) shapes_.push_back({1, 2 * length});
}

configs::Config Trial::part(const Kind* kind, std::int64_t layers, Shape shape) const {
  return smaller_config(config_, kind != nullptr ? &kind->attention : nullptr, layers,
                        shape.sequences, shape.length);
}

double Trial::bytes_of_state(double elements, int states) const {
  return 2 * states * elements * static_cast<double>(value_bytes(config_.train()));
}

// The norms and matrices of a layer read and write about 8 times the channels, 4 times the width of
// all heads, and 4 times the feed-forward width.
double Trial::kept_by_usual_layer(std::int64_t tokens) const {
  const configs::Model& model = config_.model();
  const auto of_heads = static_cast<double>(model.heads() * head_width(model));
  return static_cast<double>(tokens * value_bytes(config_.train())) *
         (8.0 * model.channels() + 4 * of_heads + 4.0 * model.feed_forward());
}

// The backward pass allocates as much as a layer keeps.
double Trial::most_bytes(const Kind& kind, std::int64_t layers, Shape shape, int states) const {
  return static_cast<double>(layers) * bytes_of_state(kind.size.elements, states) +
         static_cast<double>(layers + 1) * kept_by_usual_layer(shape.tokens());
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
    configs::Config config = part(&kind, layers, shape);
    config.mutable_train()->set_recompute(false);
    return config;
  };
  const auto kept_without_layers = [&](Shape shape) {
    return CountedModel(of_layers(0, shape), few, at::kMeta).train(shape.sequences).kept;
  };
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
  LayerBytes layer;
  layer.first = extrapolate(kept, whole()) - kept_without_layers(whole());
  layer.next = layer.first;
  layer.temporary = extrapolate(temporary, whole());
  layer.evaluation = extrapolate(evaluation, evaluated());
  if (config_.model().layers() == 1) return layer;
  // The additional bytes of a second layer are proportional to the tokens.
  const auto larger = [&](Shape shape) {
    return static_cast<double>(shape.tokens()) / static_cast<double>(shapes_[0].tokens());
  };
  CountedModel two(of_layers(2, shapes_[0]), few, at::kCPU);
  const CountedModel::Bytes bytes = two.train(1);
  layer.next +=
      larger(whole()) * (bytes.kept - kept[0] - (kept[0] - kept_without_layers(shapes_[0])));
  layer.temporary += larger(whole()) * (bytes.temporary() - temporary[0]);
  layer.evaluation += larger(evaluated()) * (two.evaluate(1) - evaluation[0]);
  return layer;
}

Trial::LayerBytes Trial::usual_layer() const {
  const double kept = kept_by_usual_layer(whole().tokens());
  return {.first = kept,
          .next = kept,
          .temporary = kept,
          .evaluation = kept_by_usual_layer(evaluated().tokens())};
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
    configs::Config config = part(nullptr, config_.model().layers(), whole());
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
      layers_.push_back(layers_fit() ? try_layer(kind) : usual_layer());
    }
  }
  const configs::Model& model = config_.model();
  const std::int64_t few = few_ids(config_, vocabulary_);
  const configs::Config without_layers = part(nullptr, 0, whole());
  CountedModel rest(without_layers, vocabulary_, at::kMeta);
  const CountedModel::Bytes of_rest = rest.train(micro_batch_);
  const double stream =
      static_cast<double>(whole().tokens() * model.channels() * value_bytes(config_.train()));
  const bool halves = config_.train().precision() == configs::Train::bf16 ||
                      config_.train().precision() == configs::Train::fp16;
  TrialMemory bytes;
  bytes.rest = of_rest.kept;
  bytes.evaluation = rest.evaluate(evaluated().sequences);
  double peak = 0;  // while the gradients of layers are computed
  for (std::size_t i = 0; i < kind_of_layer_.size(); ++i) {
    LayerBytes layer = layers_[kind_of_layer_[i]];
    bytes.evaluation = std::max(bytes.evaluation, layer.evaluation);
    // A layer keeps its input, and in its own backward pass also its output and the rest.
    if (recompute) {
      layer.temporary += layer.first - stream + stream / (halves ? 2 : 1);
      layer.first = layer.next = stream;
    }
    bytes.layers += i == 0 ? layer.first : layer.next;
    peak = std::max(peak, bytes.layers + layer.temporary);
  }
  // The logits are freed by then.
  peak += CountedModel(without_layers, few, at::kMeta).train(micro_batch_).kept;
  // The output's gradient of a tied table is kept until the embedding's is computed.
  if (model.tie_embeddings() && make_task(config_)->targets_are_text()) {
    peak += static_cast<double>((vocabulary_ - few) *
                                vocabulary_parts(model, vocabulary_).back().width *
                                value_bytes(config_.train()));
  }
  bytes.temporary = std::max(peak, bytes.layers + of_rest.peak) - bytes.layers - bytes.rest;
  tried_ =
      fmt::format("{} of {} layers and {} of {} tokens of a sequence", std::min(2, model.layers()),
                  model.layers(), shapes_.back().length, whole().length);
  return bytes;
}

// The longest sequences that the limits allow, then the largest number of them.
Trial::Shape Trial::timed_shape(int copies) const {
  const auto fits = [&](Shape shape) {
    const double share = static_cast<double>(shape.tokens()) / static_cast<double>(whole().length);
    return shape.length <= whole().length && shape.sequences <= micro_batch_ &&
           std::ranges::all_of(kinds_, [&](const Kind& kind) {
             return 3 * kind.size.flops * share <= limits_.flops &&
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
    const configs::Config rest = part(nullptr, 0, shape);
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
  const std::int64_t layers = config_.model().layers();
  if (whole_fits(memory_.at(config_.train().recompute()), kStep, copies)) {
    times.step = timed.time(part(nullptr, layers, whole()), vocabulary_);
    tried_.clear();
  } else {
    const Shape shape = timed_shape(copies);
    const std::int64_t few = few_ids(config_, vocabulary_), ids = timed_ids(shape, copies);
    // Adds the difference between `larger` and `smaller`.
    const auto add = [&](double passes, double updates, const PartTimes& larger,
                         const PartTimes& smaller) {
      times.step.forward += passes * (larger.forward - smaller.forward);
      times.step.backward += passes * (larger.backward - smaller.backward);
      times.step.optimizer += updates * (larger.optimizer - smaller.optimizer);
    };
    const configs::Config rest = part(nullptr, 0, shape);
    const double tokens =
        static_cast<double>(whole().tokens()) / static_cast<double>(shape.tokens());
    const PartTimes with_few = timed.time(rest, few);
    add(tokens, 1, with_few, {});
    if (ids > few) {
      const double share = static_cast<double>(vocabulary_ - few) / static_cast<double>(ids - few);
      add(tokens * share, share, timed.time(rest, ids), with_few);
    }
    for (const Kind& kind : kinds_) {
      const configs::Config one = part(&kind, 1, shape);
      const double flops = static_cast<double>(shape.sequences) *
                           (size_of_model(one, few).flops - size_of_model(rest, few).flops),
                   all = static_cast<double>(kind.layers * micro_batch_) * kind.size.flops;
      add(all / flops, static_cast<double>(kind.layers), timed.time(one, few), with_few);
    }
    tried_ = fmt::format("1 of {} layers, {} of {} tokens and {} of {} token ids", layers,
                         shape.tokens(), whole().tokens(), ids, vocabulary_);
  }
  times.product_flops = timed.machine().flops_per_second();
  times.copy_bytes = timed.machine().bytes_per_second();
  return times;
}

}  // namespace birkhoff
