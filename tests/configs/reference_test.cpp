// The reference documents the entire schema, and docs/configuration.md is the reference.
#include <gmock/gmock.h>

#include <fstream>
#include <set>
#include <sstream>

#include "configs/loader/check.h"
#include "configs/schema/site.pb.h"
#include "helpers.h"

namespace birkhoff {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

void collect(const Descriptor* message, std::set<const Descriptor*>& messages) {
  if (!messages.insert(message).second) return;
  for (int i = 0; i < message->field_count(); ++i) {
    if (message->field(i)->message_type()) collect(message->field(i)->message_type(), messages);
  }
}

std::set<const Descriptor*> all_messages() {
  std::set<const Descriptor*> messages;
  collect(configs::Config::descriptor(), messages);
  collect(configs::Site::descriptor(), messages);
  return messages;
}

TEST(Reference, IsTheOneInTheTree) {
  std::ifstream file(std::string(BIRKHOFF_SOURCE_DIR) + "/docs/configuration.md");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(text.str() == config_reference())
      << "docs/configuration.md is out of date; run\n"
         "build/cpu/birkhoff config reference > docs/configuration.md";
}

TEST(Reference, EveryFieldIsExplained) {
  std::stringstream reference(config_reference());
  std::string line;
  int num_fields = 0;
  while (std::getline(reference, line)) {
    if (!line.starts_with("| `")) continue;
    num_fields += 1;
    EXPECT_FALSE(line.ends_with("|  |")) << "no comment in the .proto: " << line;
  }
  int expected = 0;
  for (const Descriptor* message : all_messages()) {
    for (int i = 0; i < message->field_count(); ++i) {
      expected += !message->field(i)->options().GetExtension(configs::replaced);
    }
  }
  EXPECT_EQ(num_fields, expected);
}

TEST(Reference, EveryEnumValueIsExplained) {
  EXPECT_EQ(config_reference().find("`<br>"), std::string::npos);
  EXPECT_THAT(config_reference(), testing::HasSubstr("`paper_masked`: Masked balancing"));
}

// A number without a range would reach the model unchecked.
TEST(Schema, NumbersHaveRangesThatHoldTheirDefaults) {
  for (const Descriptor* message : all_messages()) {
    for (int i = 0; i < message->field_count(); ++i) {
      const FieldDescriptor& field = *message->field(i);
      double value = 0;
      switch (field.cpp_type()) {
        case FieldDescriptor::CPPTYPE_INT32:
          value = field.default_value_int32();
          break;
        case FieldDescriptor::CPPTYPE_INT64:
          value = static_cast<double>(field.default_value_int64());
          break;
        case FieldDescriptor::CPPTYPE_FLOAT:
          value = field.default_value_float();
          break;
        default:
          continue;
      }
      ASSERT_TRUE(field.options().HasExtension(configs::range)) << field.full_name();
      if (field.is_repeated()) continue;  // has no default
      EXPECT_TRUE(Range(field.options().GetExtension(configs::range)).contains(value))
          << field.full_name();
    }
  }
}

TEST(Range, Ends) {
  EXPECT_TRUE(Range("[0, 1)").contains(0));
  EXPECT_FALSE(Range("[0, 1)").contains(1));
  EXPECT_FALSE(Range("(0, 1]").contains(0));
  EXPECT_TRUE(Range("(0, 1]").contains(1));
  EXPECT_TRUE(Range("[1, inf)").contains(1e300));
  EXPECT_FALSE(Range("[1, inf)").contains(std::numeric_limits<double>::infinity()));
  EXPECT_FALSE(Range("[0, 1)").contains(std::numeric_limits<double>::quiet_NaN()));
}

}  // namespace
}  // namespace birkhoff
