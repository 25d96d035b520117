// Values without effect because of other values: refused when a run starts, kept in existing runs.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>

#include "cluster/base/text/number_text.h"
#include "configs/loader/check.h"
#include "helpers.h"

namespace birkhoff {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using testing::HasSubstr;
using testing::IsEmpty;

const std::string kSinkhorn = "model.attention.0.group.0.mechanism.sinkhorn.";
const std::string kRouting = "model.attention.0.group.0.mechanism.routing.";
const std::string kRelative = "model.attention.0.group.0.mechanism.relative_positions.";
const std::string kClassifier = "task={classification {}}";

struct Useless {
  std::vector<std::string> others;
  std::string path, value, what;
};

const std::vector<Useless>& all_useless() {
  const std::string uniform = kSinkhorn + "causal_balance=uniform";
  const std::string if_uniform = "has no effect if causal_balance is uniform";
  static const std::vector<Useless> all = {
      {{uniform}, kSinkhorn + "sort_net", "mlp", if_uniform},
      {{uniform}, kSinkhorn + "pooling", "sum", if_uniform},
      {{uniform}, kSinkhorn + "max_blocks", "40", if_uniform},
      {{uniform}, kSinkhorn + "temperature", "0.25", if_uniform},
      {{uniform}, kSinkhorn + "gumbel_noise", "true", if_uniform},
      {{uniform}, kSinkhorn + "iterations", "3", "if causal_balance is none or uniform"},
      {{kSinkhorn + "causal_balance=none"}, kSinkhorn + "iterations", "3", "none or uniform"},
      {{kSinkhorn + "sort_net=attention"}, kSinkhorn + "max_blocks", "40", "sort_net is attention"},
      {{kClassifier}, kSinkhorn + "causal_balance", "uniform", "has no effect in encoders"},
      {{kClassifier}, kRouting + "causal_selection", "full_topw", "has no effect in encoders"},
      {{}, kRouting + "overlap", "one_softmax", "if causal_selection is causal_bucket"},
      {{kRelative + "max_distance=0"}, kRelative + "per_head", "true", "if max_distance is 0"},
      {{kRelative + "max_distance=0"}, kRelative + "values", "false", "if max_distance is 0"},
      {{kClassifier}, "model.tie_embeddings", "false", "unless task is language_model"},
      {{kClassifier}, "data.shift_windows", "false", "unless task is language_model"},
      {{kClassifier}, "data.restart_at_documents", "true", "unless task is language_model"},
      {{"train.schedule.shape=constant"},
       "train.schedule.final_learning_rate",
       "0.0002",
       "unless shape is cosine"},
      {{"train.non_finite=stop"}, "train.max_skipped", "7", "unless non_finite is skip"},
      {{}, "train.invariant.threads", "2", "if shards is 0"},
      {{}, "agreement.max_restores", "7", "unless on_difference is restore"},
      {{"train.optimizer.adafactor.scale_by_parameter=false"},
       "train.optimizer.adafactor.epsilon2",
       "0.01",
       "unless scale_by_parameter is true"},
      {{"watchdog.seconds=0"}, "watchdog.steps", "7", "if seconds is 0"},
      {{"watchdog.seconds=0"}, "watchdog.patient_seconds", "7", "if seconds is 0"},
  };
  return all;
}

std::vector<std::string> with(const Useless& useless) {
  std::vector<std::string> settings = useless.others;
  settings.push_back(useless.path + "=" + useless.value);
  return settings;
}

class UselessValueTest : public testing::Test {
 protected:
  configs::Config load(const std::vector<std::string>& settings,
                       UselessValues useless = UselessValues::kRefuse) const {
    return load_config(file_, settings, useless);
  }

  TemporaryFolder folder_;
  std::filesystem::path file_ = folder_.write("a.txtpb", kTask);
};

TEST_F(UselessValueTest, AreRefusedInOneLine) {
  for (const Useless& useless : all_useless()) {
    SCOPED_TRACE(useless.path + " with " + testing::PrintToString(useless.others));
    const std::string what = config_error([&] { load(with(useless)); });
    EXPECT_THAT(what, testing::StartsWith("--set "));
    EXPECT_THAT(what, HasSubstr(useless.path + ": " + useless.value + " "));
    EXPECT_THAT(what, HasSubstr(useless.what));
    EXPECT_THAT(what, HasSubstr("; leave it at its default, "));
  }
}

TEST_F(UselessValueTest, NameThePlaceInAFile) {
  const auto file = folder_.write("b.txtpb", std::string(kTask) +
                                                 "train {\n  schedule { shape: rsqrt\n"
                                                 "    final_learning_rate: 0 } }");
  EXPECT_EQ(
      config_error([&] { load_config(file, {}); }),
      file.string() +
          ":4:5: train.schedule.final_learning_rate: 0 has no effect unless shape is cosine or "
          "warmup_stable_decay; leave it at its default, 0.0001, or change shape");
}

// So that a file can be reset by --set, and a resolved config be read again.
TEST_F(UselessValueTest, AreNotDefaults) {
  for (const Useless& useless : all_useless()) {
    SCOPED_TRACE(useless.path);
    configs::Config config;
    EXPECT_NO_THROW(config = load(useless.others));
    const auto resolved = folder_.write("resolved.txtpb", config_text(config));
    EXPECT_NO_THROW(EXPECT_TRUE(equal(load_config(resolved, {}), config)));
  }
  EXPECT_NO_THROW(load({kSinkhorn + "causal_balance=uniform", kSinkhorn + "iterations=5",
                        kSinkhorn + "temperature=0.75", kSinkhorn + "gumbel_noise=false"}));
}

TEST_F(UselessValueTest, StayInExistingRuns) {
  for (const Useless& useless : all_useless()) {
    SCOPED_TRACE(useless.path);
    const configs::Config config = load(with(useless), UselessValues::kKeep);
    const std::vector<UselessValue> found = useless_values(config);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].path, useless.path);
    EXPECT_TRUE(equal(parse_config(config_text(config), "text", {}), config));
  }
}

// A condition on a field that has no effect itself does not count.
TEST_F(UselessValueTest, HaveAnEffectInAnEncoder) {
  EXPECT_THAT(useless_values(load({kClassifier, kRouting + "overlap=one_softmax"})), IsEmpty());
  configs::Config old =
      load({kClassifier, kSinkhorn + "causal_balance=uniform", kSinkhorn + "iterations=3"},
           UselessValues::kKeep);
  const std::vector<UselessValue> found = useless_values(old);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].path, kSinkhorn + "causal_balance");
}

TEST_F(UselessValueTest, HaveAnEffectWithOtherValues) {
  EXPECT_THAT(useless_values(load({kSinkhorn + "iterations=3", kSinkhorn + "max_blocks=40",
                                   kSinkhorn + "sort_net=mlp", "train.invariant.shards=2",
                                   "train.invariant.threads=2", "model.tie_embeddings=false",
                                   kRelative + "max_distance=4", kRelative + "values=false",
                                   "train.schedule.final_learning_rate=0"})),
              IsEmpty());
}

// The members of a message's oneof.
bool is_member(const Descriptor& message, const std::string& name) {
  const FieldDescriptor* field = message.FindFieldByName(name);
  return field != nullptr && field->real_containing_oneof() != nullptr;
}

bool is_value(const FieldDescriptor& field, const std::string& value) {
  if (field.message_type()) return is_member(*field.message_type(), value);
  if (field.enum_type()) return field.enum_type()->FindValueByName(value) != nullptr;
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) return value.empty();
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) return value == "true" || value == "false";
  return parse_number<std::int64_t>(value).has_value();
}

void expect_valid(const configs::Condition& condition, const Descriptor& message,
                  const std::string& where) {
  const bool names_field = !condition.field().empty();
  EXPECT_NE(names_field, condition.causal()) << where;
  if (!names_field) return;
  const FieldDescriptor* other = message.FindFieldByName(condition.field());
  if (other == nullptr) other = configs::Config::descriptor()->FindFieldByName(condition.field());
  ASSERT_NE(other, nullptr) << where;
  EXPECT_NE(condition.is_size() > 0, condition.is_not_size() > 0) << where;
  for (const std::string& value : condition.is()) EXPECT_TRUE(is_value(*other, value)) << where;
  for (const std::string& value : condition.is_not()) EXPECT_TRUE(is_value(*other, value)) << where;
}

TEST(Needs, NameFieldsAndTheirValues) {
  int num_fields = 0;
  for (const auto* file :
       {configs::Config::descriptor()->file(), configs::Task::descriptor()->file(),
        configs::Mechanism::descriptor()->file()}) {
    for (int m = 0; m < file->message_type_count(); ++m) {
      const Descriptor& message = *file->message_type(m);
      for (int f = 0; f < message.field_count(); ++f) {
        const auto& options = message.field(f)->options();
        const int count = options.ExtensionSize(configs::needs);
        num_fields += count > 0;
        for (int i = 0; i < count; ++i) {
          expect_valid(options.GetExtension(configs::needs, i), message,
                       message.field(f)->full_name());
        }
      }
    }
  }
  EXPECT_EQ(num_fields, 52);
}

}  // namespace
}  // namespace birkhoff
