// Memory and time of a rank's micro-batch, from trials on this machine's CPU with the kernels that
// a run would use. Where the whole micro-batch is too large, trials are of one and two layers of a
// kind on few tokens, and embedding, head and loss are counted without memory. Local.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "configs/schema/config.pb.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/plan/counted_model.h"

namespace birkhoff {

// Bytes of LibTorch's tensors that one micro-batch takes besides the state.
struct TrialMemory {
  double layers = 0;      // kept by the layers for the backward pass
  double rest = 0;        // kept by embedding, output, loss and their sums
  double temporary = 0;   // more than that at the step's peak
  double evaluation = 0;  // peak of evaluate.micro_batch sequences without gradients
};

// Seconds of one micro-batch's passes and of an update, and speeds of the machine in between.
struct TrialTimes {
  PartTimes step;
  double product_flops = 0;  // FLOP/s of at::mm on 1024x1024 matrices
  double copy_bytes = 0;     // bytes read and written per second by a copy of 64 MB
  int neighbours = 0;        // threads that trained at the same time
};

// Limits of a trial's step: about a second, and less than 1 GB together with the program and the
// freed memory that its heap keeps.
struct TrialLimits {
  double flops = 1.5e11, bytes = 4.7e8;
};

class Trial {
 public:
  // config: resolved. Its device is ignored, fp16 is run as bf16, and virtual shards and documents
  // are left out.
  Trial(const configs::Config& config, std::int64_t vocabulary, std::int64_t micro_batch,
        TrialLimits limits = {});

  // FLOPs of the forward pass of all layers, which is what train.recompute repeats.
  double layers_flops_per_sequence() const { return flops_of_layers_; }

  // Whether the limits hold two layers. Else memory is estimated for usual layers, and there are no
  // times.
  bool layers_fit() const;

  // With train.recompute as given. Counts with a PeakMemory.
  TrialMemory memory(bool recompute);

  // As configured. Medians of rounds. To imitate the machine's other ranks, up to `neighbours`
  // threads train at the same time, as far as there is memory. Needs layers_fit() and, before,
  // memory() as configured.
  TrialTimes times(int rounds, int neighbours);

  // The problem of the last call, such as "512 of 8192 tokens"; empty: the whole micro-batch.
  const std::string& tried() const { return tried_; }

 private:
  // The sequences and tokens of the sources, if there are targets, too.
  struct Shape {
    std::int64_t sequences = 1, length = 1;
    std::int64_t tokens() const { return sequences * length; }
  };
  // Layers of one stack with equal attention.
  struct Kind {
    bool of_sources = false;  // the encoder of a model that also has a decoder
    configs::Attention attention;
    configs::Attention cross_attention;  // of the decoder of a model that also has an encoder
    std::int64_t layers = 0;
    ModelSize size;  // of one layer
  };
  // Of one layer on the whole micro-batch, without recomputation.
  struct LayerBytes {
    double first = 0, next = 0;  // kept by the model's first layer and by a later one
    double temporary = 0, evaluation = 0;
    // Of `first`, what is not the layer's but the encoder's: its outputs and last norm.
    double of_encoder = 0;
  };

  Shape whole() const { return {micro_batch_, config_.data().sequence_length()}; }
  Shape evaluated() const { return {config_.evaluate().micro_batch(), whole().length}; }
  void add_layer(bool of_sources, const configs::Attention& attention,
                 const configs::Attention& cross_attention);
  configs::Config whole_model(Shape shape) const;
  configs::Config without_layers(Shape shape) const;
  // With `layers` layers of one kind. The encoder's come with one layer of the decoder, because
  // nothing else reads their outputs.
  configs::Config part(const Kind& kind, std::int64_t layers, Shape shape) const;
  const Kind* decoder_tried_with(const Kind& kind) const;  // null: none
  std::int64_t layers_of_stack(const Kind& kind) const;
  // Those that a layer computes: sources or targets.
  std::int64_t tokens_of(const Kind& kind, Shape shape) const;
  bool crosses(const Kind& kind) const { return config_.model().has_encoder() && !kind.of_sources; }
  // A layer's input.
  double stream_bytes(const Kind& kind, Shape shape) const;
  // Of parameters and gradients `states` times.
  double bytes_of_state(double elements, int states) const;
  double kept_by_usual_layer(const Kind& kind, Shape shape) const;
  // Of a step, state included; an upper estimate.
  double most_bytes(const Kind& kind, std::int64_t layers, Shape shape, int states) const;
  bool whole_fits(const TrialMemory& bytes, int states, int copies) const;
  // From values for shapes_.
  double extrapolate(const std::vector<double>& values, Shape to) const;
  LayerBytes try_layer(const Kind& kind) const;
  LayerBytes usual_layer(const Kind& kind) const;
  TrialMemory extrapolated(bool recompute);
  Shape timed_shape(int copies) const;
  std::int64_t timed_ids(Shape shape, int copies) const;

  const configs::Config config_;
  const std::int64_t vocabulary_, micro_batch_;
  const TrialLimits limits_;
  std::vector<Kind> kinds_;
  std::vector<std::size_t> kind_of_layer_;
  std::vector<Shape> shapes_;                       // on which layers are tried
  double flops_of_layers_ = 0, flops_of_rest_ = 0;  // of a sequence
  double elements_ = 0;
  std::vector<LayerBytes> layers_;      // by kind, once tried
  std::map<bool, TrialMemory> memory_;  // by recompute
  std::string tried_;
};

}  // namespace birkhoff
