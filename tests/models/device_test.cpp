// A model is on one device: its operations must make all tensors on the device of the parameters.
// LibTorch's meta device has shapes but no values, so this test needs no GPU. An operation on
// tensors of two devices is an error there, as on a GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/models/model_fixture.h"

namespace birkhoff {
namespace {

// For operations whose meta kernels exist only in Python: a run on zeros yields the shapes. As on a
// GPU, a tensor without dimensions may be on the host.
void run_on_zeros(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& arguments = operation.schema().arguments();
  at::Tensor out;  // defined for operations that write to an argument
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& argument = (*stack)[stack->size() - arguments.size() + i];
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::Tensor tensor = argument.toTensor();
    TORCH_CHECK(tensor.is_meta() || tensor.dim() == 0, operation.operator_name(),
                ": tensors of two devices");
    if (arguments[i].is_out()) out = tensor;
    argument = at::zeros(tensor.sizes(), tensor.options().device(at::kCPU));
  }
  operation.callBoxed(stack);
  for (std::size_t i = 0; i < operation.schema().returns().size(); ++i) {
    c10::IValue& result = (*stack)[stack->size() - 1 - i];
    if (out.defined()) {
      result = out.resize_(result.toTensor().sizes());
    } else if (result.isTensor() && result.toTensor().defined()) {
      result = result.toTensor().to(at::kMeta);
    }
  }
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  for (const char* name :
       {"index_select", "native_layer_norm", "native_layer_norm_backward", "where.self",
        "logical_and.out", "logical_or.out", "logical_not.out", "_logcumsumexp", "where.self_out",
        "embedding_dense_backward", "relu", "abs.out"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_zeros>());
  }
}

// The text of a mechanism, for every mechanism in every variant.
class DeviceMode : public ::testing::TestWithParam<std::string> {};

std::vector<std::string> all_mechanisms() {
  std::vector<std::string> texts;
  for (const auto& each : test::all_cases()) {
    if (each.causal) texts.push_back(each.config.ShortDebugString());
  }
  return texts;
}

INSTANTIATE_TEST_SUITE_P(Models, DeviceMode, ::testing::ValuesIn(all_mechanisms()));

TEST_P(DeviceMode, EverythingIsMadeWhereTheParametersAre) {
  EXPECT_THROW(at::zeros({2}, at::kMeta) + at::zeros({2}), c10::Error) << "the test proves nothing";
  for (const char* positions : {"learned", "sinusoidal", "no_positions"}) {
    for (const char* precision : {"fp32", "bf16"}) {
      for (const bool documents : {false, true}) {
        SCOPED_TRACE(std::string(positions) + " " + precision + (documents ? " documents" : ""));
        const TestModel model = make_test_model(
            "attention { group { mechanism { " + GetParam() + " } } } positions: " + positions,
            {std::string("train.precision=") + precision}, at::kMeta);
        Batch batch = make_batch(2, 16);
        if (documents) {
          batch.fields["segments"] = at::zeros({2, 16}, at::kInt);
          batch.fields["positions"] = at::arange(16, at::kLong).expand({2, 16}).contiguous();
        }
        const LossSums sums = model->loss_sums(batch.to(at::kMeta), std::nullopt);
        EXPECT_TRUE(sums.loss.is_meta() && sums.nats.is_meta() && sums.count.is_meta());
        sums.loss.backward();
        for (const Parameter& parameter : model->parameters().list()) {
          EXPECT_TRUE(parameter.value.grad().defined() && parameter.value.grad().is_meta())
              << parameter.name;
        }
      }
    }
  }
}

TEST(DeviceOfAPast, EverythingIsMadeWhereTheParametersAre) {
  for (const char* const recompute : {"false", "true"}) {
    const TestModel model = make_test_model(
        "positions: relative_sinusoidal memory { length: 24 evaluation_clamp: 9 "
        "evaluation_same_length: true }",
        {"train.precision=bf16", std::string("train.recompute=") + recompute}, at::kMeta);
    Batch batch = make_batch(2, 16).to(at::kMeta);
    for (const std::int64_t tokens : {16, 24, 24}) {
      const LossSums sums = model->loss_sums(batch, std::nullopt);
      sums.loss.backward();
      EXPECT_TRUE(sums.past_BNMC.is_meta() && sums.past_BNMC.scalar_type() == at::kFloat);
      EXPECT_EQ(sums.past_BNMC.sizes(), (at::IntArrayRef{2, 2, tokens, 8}));
      batch.fields["past"] = sums.past_BNMC;
    }
  }
}

TEST(DeviceOfTwoStacks, EverythingIsMadeWhereTheParametersAre) {
  for (const char* const recompute : {"false", "true"}) {
    const configs::Config config = parse_config(
        "task { translation {} } data { corpus: 'none' sequence_length: 16 } "
        "model { layers: 2 channels: 8 heads: 2 }",
        "test", {"train.precision=bf16", std::string("train.recompute=") + recompute});
    Parameters parameters = make_parameters(config, at::kMeta);
    const TokenStack encoder(config, StackRole::kSourceEncoder, parameters);
    const TokenStack decoder(config, StackRole::kTargetDecoder, parameters);
    Batch source = make_batch(2, 16), target = make_batch(2, 12);
    source.fields["lengths"] = at::tensor({16, 5}, at::kLong);
    source = source.to(at::kMeta);
    target = target.to(at::kMeta);
    NamedSums sums;
    const Memory memory = encoder.encode(source, {}, sums);
    EXPECT_EQ(memory.x_BSC.scalar_type(), at::kFloat);  // gradients of layers are added in fp32
    const at::Tensor out = decoder.forward(target, {}, sums, memory);
    EXPECT_TRUE(out.is_meta() && out.scalar_type() == at::kBFloat16);
    out.sum().backward();
    for (const Parameter& parameter : parameters.list()) {
      EXPECT_TRUE(parameter.value.grad().defined() && parameter.value.grad().is_meta())
          << parameter.name;
    }
    const auto cache = decoder.stack.decode_cache(2, memory);
    const at::Tensor tokens = target.at("inputs").select(1, 0);
    cache->select_rows(at::zeros({2}, tokens.options()));
    EXPECT_TRUE(decoder.decode_step(*cache, tokens).is_meta());
  }
}

}  // namespace
}  // namespace birkhoff
