#include <fmt/format.h>

#include <string>

#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;

// A class, so that all checks share the config and the source locations.
class TrainCheck {
 public:
  TrainCheck(const configs::Config& config, const SourceLocations& places)
      : config_(config), places_(places) {}

  void run() const {
    const auto& train = config_.train();
    if (train.micro_batch() > train.global_batch()) {
      config_error(places_, "train.micro_batch", "{} sequences are more than train.global_batch {}",
                   train.micro_batch(), train.global_batch());
    }
    if (train.invariant().shards() > train.global_batch()) {
      config_error(places_, "train.invariant.shards",
                   "{} are more than the sequences per step, train.global_batch {}",
                   counted(train.invariant().shards(), "shard"), train.global_batch());
    }
    if (train.precision() == configs::Train::fp64 && config_.device() == configs::Config::cuda) {
      config_error(places_, "train.precision",
                   "fp64 needs device: cpu; on a GPU use fp32, or bf16 with fp32 parameters");
    }
    if (train.zero_stage() > 0 &&
        !optimizer().message_type()->options().GetExtension(configs::slices)) {
      config_error(places_, "train.zero_stage",
                   "must be 0 with train.optimizer.{}, whose state cannot be split into slices; "
                   "use train.optimizer.adamw or sgd, or leave zero_stage out",
                   optimizer().name());
    }
    const auto& sgd = train.optimizer().sgd();
    if (sgd.nesterov() && sgd.momentum() == 0) {
      config_error(places_, "train.optimizer.sgd.nesterov",
                   "has no effect with train.optimizer.sgd.momentum 0; set the momentum, or leave "
                   "nesterov out");
    }
    if (train.batch_tokens() > 0) check_batch_tokens();
    check_warm_start();
    if (has_batch_norm(config_.task())) check_batch_norm();
    if (train.cuda_graph()) check_cuda_graph();
    if (config_.model().memory().length() > 0) check_memory();
    check_schedule();
  }

 private:
  void check_schedule() const {
    const auto& schedule = config_.train().schedule();
    switch (schedule.shape()) {
      case configs::Schedule::constant:
        break;
      case configs::Schedule::warmup_stable_decay:
      case configs::Schedule::cosine:
        if (schedule.final_learning_rate() > schedule.learning_rate()) {
          config_error(places_, "train.schedule.final_learning_rate",
                       "{} is above the peak, train.schedule.learning_rate {}",
                       schedule.final_learning_rate(), schedule.learning_rate());
        }
        if (schedule.steps() > 0 &&
            schedule.steps() <= schedule.warmup_steps() + schedule.decay_steps()) {
          config_error(places_, "train.schedule.steps",
                       "{} leaves nothing between train.schedule.warmup_steps {} and decay_steps "
                       "{}; use more steps, or 0 for train.steps",
                       schedule.steps(), schedule.warmup_steps(), schedule.decay_steps());
        }
        if (const std::int64_t end =
                schedule.steps() > 0 ? schedule.steps() : config_.train().steps();
            schedule.decay_steps() > 0 && schedule.warmup_steps() + schedule.decay_steps() > end) {
          config_error(places_, "train.schedule.decay_steps",
                       "{} and train.schedule.warmup_steps {} are more than the {} of the "
                       "schedule; the peak is never reached",
                       schedule.decay_steps(), schedule.warmup_steps(), counted(end, "step"));
        }
        break;
      case configs::Schedule::rsqrt:
      case configs::Schedule::rsqrt_decay:
        if (schedule.warmup_steps() == 0) {
          config_error(places_, "train.schedule.warmup_steps",
                       "must be at least 1 with shape {}: the rate decays from the end of the "
                       "warm-up",
                       configs::Schedule::Shape_Name(schedule.shape()));
        }
        break;
      case configs::Schedule::step_decay:
        if (schedule.decay_epoch().empty()) {
          config_error(places_, "train.schedule.decay_epoch",
                       "is empty, so shape step_decay never decays; name the epochs, or use shape "
                       "constant");
        }
        break;
    }
    if (schedule.shape() != configs::Schedule::step_decay && !schedule.decay_epoch().empty()) {
      config_error(places_, "train.schedule.decay_epoch",
                   "has no effect with shape {}; leave it out, or use shape step_decay",
                   configs::Schedule::Shape_Name(schedule.shape()));
    }
    for (int i = 1; i < schedule.decay_epoch_size(); ++i) {
      const int last = schedule.decay_epoch(i - 1);
      if (schedule.decay_epoch(i) > last) continue;
      config_error(places_, fmt::format("train.schedule.decay_epoch.{}", i),
                   "{} is not above {}; epochs must be ascending", schedule.decay_epoch(i), last);
    }
  }

  void check_warm_start() const {
    const auto& warm_start = config_.train().warm_start();
    for (int i = 0; i < warm_start.rename_size(); ++i) {
      const std::string path = fmt::format("train.warm_start.rename.{}", i);
      const std::string& rule = warm_start.rename(i);
      if (warm_start.from().empty()) {
        config_error(places_, path, "has no effect without train.warm_start.from; leave it out");
      }
      if (rule.find('=') == std::string::npos || rule.front() == '=') {
        config_error(places_, path, "'{}' is not A=B, the start of a name here and its start there",
                     rule);
      }
    }
  }

  void check_batch_tokens() const {
    const auto& train = config_.train();
    if (!config_.task().has_classification() && !config_.task().has_translation()) {
      config_error(places_, "train.batch_tokens",
                   "needs a task whose samples differ in length, classification or translation; "
                   "leave it out, and use train.global_batch");
    }
    const int target_length = config_.task().translation().target_length();
    const bool of_target = target_length > config_.data().sequence_length();
    const int longest = of_target ? target_length : config_.data().sequence_length();
    if (train.batch_tokens() < longest) {
      config_error(places_, "train.batch_tokens", "{} is less than one sample, {} {}",
                   train.batch_tokens(),
                   of_target ? "task.translation.target_length" : "data.sequence_length", longest);
    }
    if (train.global_batch() != longest_samples(config_)) {
      config_error(places_, "train.global_batch",
                   "{} is not {}, the number of the longest samples that fit in "
                   "train.batch_tokens {}; leave it out, or set it to that",
                   train.global_batch(), longest_samples(config_), train.batch_tokens());
    }
    if (train.invariant().shards() > 0) {
      config_error(places_, "train.invariant.shards",
                   "must be 0 with train.batch_tokens, whose batches differ in size; leave it out, "
                   "or use train.global_batch");
    }
    if (train.cuda_graph()) {
      config_error(places_, "train.cuda_graph",
                   "must be false with train.batch_tokens, whose batches differ in size; leave it "
                   "out, or use train.global_batch");
    }
  }

  // The memory of a sequence is that of the sequence before it.
  void check_memory() const {
    const char* const field = "model.memory.length";
    if (config_.model().positions() != configs::Model::relative_sinusoidal) {
      config_error(places_, field,
                   "needs model.positions: relative_sinusoidal, which tell tokens of the memory "
                   "from those of the sequence; set them, or leave the memory out");
    }
    if (config_.data().restart_at_documents()) {
      config_error(places_, field,
                   "must be 0 with data.restart_at_documents, because a memory continues across "
                   "documents; leave one of them out");
    }
    if (config_.train().cuda_graph()) {
      config_error(places_, field,
                   "must be 0 with train.cuda_graph, which replays steps of one shape; leave one "
                   "of them out");
    }
    if (config_.mesh().tensor() > 1) {
      config_error(places_, field,
                   "must be 0 with mesh.tensor {}, whose ranks hold slices of the tokens; leave "
                   "one of them out",
                   config_.mesh().tensor());
    }
    if (config_.evaluate().stride() > 0) {
      config_error(places_, "evaluate.stride",
                   "must be 0 with model.memory.length: the memory is the context of windows that "
                   "do not overlap; leave it out");
    }
    const int length = evaluation_sequence_length(config_);
    if (length > config_.data().sequence_length()) {
      config_error(places_, "model.memory.evaluation_sequence_length",
                   "{} is above data.sequence_length {}; use at most that", length,
                   config_.data().sequence_length());
    }
  }

  // Each forward pass sees the rank's whole share of the global batch, once.
  void check_batch_norm() const {
    const auto& train = config_.train();
    const char* const why = "with batch norms, whose statistics are those of the global batch";
    if (train.global_batch() < 2) {
      config_error(places_, "train.global_batch", "must be at least 2 {}", why);
    }
    if (train.micro_batch() > 0) {
      config_error(places_, "train.micro_batch",
                   "must be 0 {}; leave it out, and use more ranks if memory is short", why);
    }
    if (train.invariant().shards() > 0) {
      config_error(places_, "train.invariant.shards", "must be 0 {}; leave it out", why);
    }
    if (train.recompute()) {
      config_error(places_, "train.recompute",
                   "must be false {} and which communicate in each pass; leave it out", why);
    }
    if (train.cuda_graph()) {
      config_error(places_, "train.cuda_graph",
                   "must be false {} and which communicate in each pass; leave it out", why);
    }
  }

  // The chosen member of train.optimizer; a resolved config always has one.
  const FieldDescriptor& optimizer() const { return *chosen_member(config_.train().optimizer()); }

  // A graph replays the same launches in every step.
  void check_cuda_graph() const {
    const auto& train = config_.train();
    if (config_.device() != configs::Config::cuda) {
      config_error(places_, "train.cuda_graph", "needs device: cuda; leave it out on CPUs");
    }
    if (!optimizer().message_type()->options().GetExtension(configs::device_scalars)) {
      config_error(
          places_, "train.cuda_graph",
          "must be false with train.optimizer.{}, whose update reads its rates from the host; "
          "use train.optimizer.adamw or sgd, or leave cuda_graph out",
          optimizer().name());
    }
    if (train.zero_stage() > 1) {
      config_error(places_, "train.cuda_graph",
                   "must be false with train.zero_stage {}, which communicates within the passes; "
                   "use zero_stage 1, or leave cuda_graph out",
                   train.zero_stage());
    }
    if (train.invariant().shards() > 0) {
      config_error(
          places_, "train.cuda_graph",
          "must be false with train.invariant.shards, whose sums are reduced between the passes "
          "of a step; leave one of them out");
    }
  }

  const configs::Config& config_;
  const SourceLocations& places_;
};

}  // namespace

void check_train(const configs::Config& config, const SourceLocations& places) {
  TrainCheck(config, places).run();
}

}  // namespace birkhoff
