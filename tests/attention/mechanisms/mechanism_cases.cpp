#include "tests/attention/mechanisms/mechanism_cases.h"

#include <ATen/ATen.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdlib>

#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/schema/options.pb.h"

namespace birkhoff::test {
namespace {

// The reference, whose error bounds that of kernels, uses MKL. Its order of sums must not depend on
// the CPU: with AVX-512 on Intel's CPUs it sums short products in more lanes than elsewhere. Read
// at the first call of MKL.
[[maybe_unused]] const int kSameReferenceOnAllCpus =
    setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/0);

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Calls `visit` for each field of the message and, after it, of the messages inside it.
void visit_fields(Message* message,
                  const std::function<void(Message*, const FieldDescriptor*)>& visit) {
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->field(i);
    visit(message, field);
    if (field->message_type() && field->real_containing_oneof() == nullptr) {
      visit_fields(message->GetReflection()->MutableMessage(message, field), visit);
    }
  }
}

Message* chosen_mechanism(configs::Mechanism& config) {
  const auto& reflection = *config.GetReflection();
  return reflection.MutableMessage(
      &config, reflection.GetOneofFieldDescriptor(config, config.GetDescriptor()->oneof_decl(0)));
}

// Calls `visit(name)` once for each variant; `message` has the variant's value during the call.
void visit_variants(Message* message, const std::string& name,
                    const std::function<void(const std::string&)>& visit) {
  const auto* reflection = message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->field(i);
    const std::string path = name + "_" + field->name();
    if (field->enum_type()) {
      for (int v = 0; v < field->enum_type()->value_count(); ++v) {
        const auto* value = field->enum_type()->value(v);
        if (value == field->default_value_enum()) continue;
        reflection->SetEnum(message, field, value);
        visit(path + "_" + value->name());
        reflection->ClearField(message, field);
      }
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      reflection->SetBool(message, field, !field->default_value_bool());
      visit(path);
      reflection->ClearField(message, field);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT32) {
      for (int v = 0; v < field->options().ExtensionSize(configs::variant); ++v) {
        const int value = field->options().GetExtension(configs::variant, v);
        reflection->SetInt32(message, field, value);
        visit(path + "_" + std::to_string(value));
        reflection->ClearField(message, field);
      }
    }
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const MechanismCase& mechanism_case) {
  return out << mechanism_case.name;
}

std::vector<MechanismCase> all_cases(std::int64_t block) {
  std::vector<MechanismCase> cases;
  const auto* oneof = configs::Mechanism::descriptor()->FindOneofByName("kind");
  for (int i = 0; i < oneof->field_count(); ++i) {
    configs::Mechanism config;
    Message* chosen = config.GetReflection()->MutableMessage(&config, oneof->field(i));
    visit_fields(chosen, [&](Message* message, const FieldDescriptor* field) {
      if (field->options().GetExtension(configs::block_length)) {
        message->GetReflection()->SetInt32(message, field, static_cast<int>(block));
      }
    });
    const bool encoder_only =
        chosen->GetDescriptor()->options().HasExtension(configs::encoder_only);
    for (const bool causal : {false, true}) {
      if (causal && encoder_only) continue;
      const auto add = [&](const std::string& name) {
        cases.push_back({name + (causal ? "_causal" : "_encoder"), config, causal});
      };
      const std::string& name = oneof->field(i)->name();
      add(name);
      visit_variants(chosen, name, add);
      const MechanismTraits traits = Built(config, causal, at::kFloat, 8 * block).traits;
      if (!traits.takes_sinks) continue;
      config.set_sink(true);
      add(name + "_sink");
      if (traits.takes_relative_positions) {
        auto& relative = *config.mutable_relative_positions();
        relative.set_max_distance(3);
        add(name + "_sink_relative");
        config.clear_sink();
        relative.set_per_head(true);
        relative.set_values(false);
        add(name + "_relative_keys");
        config.clear_relative_positions();
      }
      config.clear_sink();
    }
  }
  return cases;
}

std::vector<MechanismCase> cases_where(bool (*chosen)(const MechanismCase&, const MechanismTraits&),
                                       std::int64_t block) {
  std::vector<MechanismCase> cases = all_cases(block);
  std::erase_if(cases, [&](const MechanismCase& each) {
    return !chosen(each, Built(each.config, each.causal, at::kFloat, 8 * block).traits);
  });
  return cases;
}

configs::Mechanism with_noise(configs::Mechanism config) {
  visit_fields(chosen_mechanism(config), [](Message* message, const FieldDescriptor* field) {
    if (!field->options().GetExtension(configs::noise)) return;
    const auto& reflection = *message->GetReflection();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      reflection.SetBool(message, field, true);
    } else {
      reflection.SetFloat(message, field, 0.3f);
    }
  });
  return config;
}

bool has_noise(const MechanismCase& each, const MechanismTraits&) {
  try {
    check_trains(each.config, SourceLocations("test"));
  } catch (const Error&) {
    return false;
  }
  return with_noise(each.config).SerializeAsString() != each.config.SerializeAsString();
}

at::Tensor random_tensor(at::IntArrayRef shape, at::ScalarType dtype, std::uint64_t seed) {
  Parameters parameters(seed, dtype);
  return parameters.add("x", shape, Initializer::normal(1), false).detach();
}

Built::Built(const configs::Mechanism& config, bool causal, at::ScalarType dtype,
             std::int64_t sequence_length)
    : Built(config,
            {.channels = 5,
             .heads = 2,
             .head_dim = 3,
             .sequence_length = sequence_length,
             .causal = causal},
            dtype) {}

Built::Built(const configs::Mechanism& config, const MechanismShape& shape, at::ScalarType dtype)
    : parameters(3, dtype) {
  mechanism = make_mechanism(config, shape, "attention", parameters);
  traits = mechanism->traits();
  at::NoGradGuard no_grad;
  std::uint64_t seed = 1000;
  for (const Parameter& parameter : parameters.list()) {
    at::Tensor value = parameter.value;
    value.copy_(random_tensor(value.sizes(), dtype, ++seed) * 0.5);
  }
}

AttentionInput random_input(std::int64_t num_tokens, at::ScalarType dtype, std::uint64_t seed,
                            const MechanismTraits& traits) {
  const auto leaf = [&](at::IntArrayRef shape, std::uint64_t part) {
    return random_tensor(shape, dtype, 10 * seed + part).set_requires_grad(true);
  };
  AttentionInput in;
  in.q_BHLD = leaf({2, 2, num_tokens, 3}, 0);
  in.k_BHSD = traits.shares_query_key ? in.q_BHLD : leaf({2, 2, num_tokens, 3}, 1);
  in.v_BHSD = traits.ties_key_value ? in.k_BHSD : leaf({2, 2, num_tokens, 3}, 2);
  in.x_q_BLC = in.x_kv_BSC = leaf({2, num_tokens, 5}, 3);
  return in;
}

namespace {

// Applies `change(tensor, token dim)` to every tensor with a token dim. Tensors that are shared
// stay shared.
AttentionInput map_tokens(
    const AttentionInput& in,
    const std::function<at::Tensor(const at::Tensor&, std::int64_t)>& change) {
  const auto leaf = [&](const at::Tensor& x, std::int64_t dim) {
    return change(x.detach(), dim).clone().set_requires_grad(true);
  };
  AttentionInput out = in;
  out.q_BHLD = leaf(in.q_BHLD, 2);
  out.k_BHSD = in.k_BHSD.is_same(in.q_BHLD) ? out.q_BHLD : leaf(in.k_BHSD, 2);
  out.v_BHSD = in.v_BHSD.is_same(in.k_BHSD) ? out.k_BHSD : leaf(in.v_BHSD, 2);
  out.x_q_BLC = out.x_kv_BSC = leaf(in.x_q_BLC, 1);
  return out;
}

}  // namespace

AttentionInput batch_slice(const AttentionInput& in, std::int64_t first, std::int64_t count) {
  AttentionInput out =
      map_tokens(in, [&](const at::Tensor& x, std::int64_t) { return x.narrow(0, first, count); });
  const auto cut = [&](const at::Tensor& x) { return x.defined() ? x.narrow(0, first, count) : x; };
  out.key_lengths_B = cut(in.key_lengths_B);
  out.segments_q_BL = out.segments_kv_BS = cut(in.segments_q_BL);
  if (in.noise) out.noise->sample_ids_B = cut(in.noise->sample_ids_B).contiguous();
  return out;
}

AttentionInput token_slice(const AttentionInput& in, std::int64_t first, std::int64_t count) {
  AttentionInput out = map_tokens(
      in, [&](const at::Tensor& x, std::int64_t dim) { return x.narrow(dim, first, count); });
  if (in.segments_q_BL.defined()) {
    out.segments_q_BL = out.segments_kv_BS = in.segments_q_BL.narrow(1, first, count);
  }
  return out;
}

AttentionInput replace_tokens(const AttentionInput& in, std::int64_t first, std::int64_t last,
                              std::uint64_t seed) {
  return map_tokens(in, [&](const at::Tensor& x, std::int64_t dim) {
    at::Tensor changed = x.clone();
    at::Tensor part = changed.narrow(dim, first, last - first);
    part.copy_(random_tensor(part.sizes(), x.scalar_type(), seed++));
    return changed;
  });
}

std::vector<at::Tensor> leaves(const AttentionInput& in, const Parameters& parameters) {
  std::vector<at::Tensor> all{in.q_BHLD};
  if (!in.k_BHSD.is_same(in.q_BHLD)) all.push_back(in.k_BHSD);
  all.push_back(in.x_q_BLC);
  if (!in.v_BHSD.is_same(in.k_BHSD)) all.push_back(in.v_BHSD);
  for (const Parameter& parameter : parameters.list()) all.push_back(parameter.value);
  return all;
}

std::vector<at::Tensor> gradients(const at::Tensor& out, const std::vector<at::Tensor>& leaves,
                                  std::uint64_t seed) {
  const at::Tensor loss = (out * random_tensor(out.sizes(), out.scalar_type(), seed)).sum();
  std::vector<at::Tensor> result = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/true,
                                                         false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (!result[i].defined()) result[i] = at::zeros_like(leaves[i]);
  }
  return result;
}

at::Tensor run(const Mechanism& mechanism, const AttentionInput& in, Path path) {
  return mechanism.attend(in, path).out_BHLD;
}

bool is_same(const at::Tensor& a, const at::Tensor& b, const MechanismTraits& traits, Path path) {
  if (path != Path::kReference || !traits.clusters) return at::equal(a, b);
  const double eps = a.scalar_type() == at::kDouble ? 0x1p-52 : 0x1p-23;
  return max_difference(a, b) <= kTokens * eps * a.detach().abs().max().item<double>();
}

double max_difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 && b.numel() == 0) return 0;
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}

}  // namespace birkhoff::test
