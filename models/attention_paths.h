// On which path each layer's attention runs, and why it is not our fastest kernel: asked of a
// configuration, without running it on its device.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/kernels/common/path.h"
#include "configs/schema/config.pb.h"
#include "data/batch/batch.h"
#include "models/model.h"

namespace birkhoff {

// Makes the model of a configuration.
using ModelMaker = std::function<std::unique_ptr<Model>(const configs::Config&, at::Device)>;

// What the operations choose in the forward pass of a training step on the device of the
// configuration; their callers are head groups, by the prefix of their parameters. `batch` is a
// rank's share of a step, of which only sizes and dtypes matter. The model runs on LibTorch's meta
// device, which takes milliseconds and no memory. Only one thread at a time may call it. Errors as
// `make`.
std::vector<PathTaken> attention_paths(const configs::Config& config, const ModelMaker& make,
                                       Batch batch);

// Those that are slower than they could be, a line for each operation of a head group, for instance
// "layers 0 to 5, heads 4 to 7 (routing): attention over gathered rows takes a slower kernel,
// because the dtype is fp32, not bf16 or fp16". Layers with the same answer share a line. If
// LibTorch's meta device lacks an operation of the model, one line says so.
std::vector<std::string> slow_attention_paths(const configs::Config& config, const ModelMaker& make,
                                              const Batch& batch);

}  // namespace birkhoff
