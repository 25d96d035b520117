#include <fmt/ranges.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <set>

#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "configs/loader/message_text.h"
#include "configs/schema/site.pb.h"

namespace birkhoff {

// A serialized FileDescriptorSet of the .proto files with their comments, which the code that
// protoc generates omits. configs/embed.cmake writes it.
extern const unsigned char kSchemaSource[];
extern const std::size_t kSchemaSourceBytes;

namespace {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptorProto;
using google::protobuf::FileDescriptorSet;
using google::protobuf::SourceLocation;

constexpr const char* kIntroduction = R"(# Configuration reference

Generated from the comments of `configs/schema/*.proto` by `birkhoff config reference`; edit those.

A configuration is a text file (`.txtpb`, Protobuf text format). It uses `name: value` for values,
`name { ... }` for messages, a repeated name for the entries of a list, and `#` for comments. All
fields except the task are optional; `birkhoff config print FILE` shows every value that a run
would use.

- `include: "other.txtpb"` starts from another file, relative to this one and inside the first
  file's folder. This file overrides it: values, lists and the choice in a "one of" are replaced,
  messages are merged.
- Integers are decimal, without leading zeros; `--set` also accepts an exponent, `1e6`.
- `--set path=value` changes a field from the command line, after the files are read:
  `--set train.steps=100`, `--set model.attention.0.group.0.mechanism.sinkhorn.block=32` (list
  entries by index; the next free index adds one), and
  `--set 'model.attention.0={group{mechanism{dense{}}}}'` (replaces a message or list). Naming a
  member of a "one of" chooses it.
- *fixed* fields cannot change when a run is resumed; *free* ones can. *choice fixed*: the chosen
  member of a "one of" cannot change. `birkhoff eval --set` may change fields marked *eval*.
)";

constexpr const char* kSites = R"(
# Site profiles

A separate file for `birkhoff submit --site` (`docs/slurm.md`), in the same text format, without
`include`. Examples: `configs/sites/`.
)";

// The schema's descriptors, with comments.
class SchemaSource {
 public:
  SchemaSource() {
    FileDescriptorProto options;  // not in the set, because every Protobuf program has it
    FileDescriptorProto::descriptor()->file()->CopyTo(&options);
    pool_.BuildFile(options);
    FileDescriptorSet files;
    require(files.ParseFromArray(kSchemaSource, static_cast<int>(kSchemaSourceBytes)),
            "the embedded schema is damaged");
    for (const FileDescriptorProto& file : files.file()) {
      require(pool_.BuildFile(file) != nullptr, "the embedded schema is not in order");
    }
  }

  const Descriptor& message(const Descriptor& own) const {
    return *pool_.FindMessageTypeByName(own.full_name());
  }

 private:
  DescriptorPool pool_;
};

// The comment above or after a declaration, on one line.
template <typename T>
std::string comment(const T& declaration) {
  SourceLocation location;
  if (!declaration.GetSourceLocation(&location)) return "";
  std::string text = location.leading_comments + location.trailing_comments;
  std::string line;
  for (const char c : text) {
    const bool space = c == ' ' || c == '\n';
    if (space && (line.empty() || line.back() == ' ')) continue;
    if (c == '|') line += '\\';  // it would end the table cell
    line += space ? ' ' : c;
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

// A paragraph in lines of at most 100 columns.
std::string wrapped(const std::string& line) {
  constexpr std::size_t kColumns = 100;
  std::string text;
  std::size_t begin = 0;
  while (line.size() - begin > kColumns) {
    const std::size_t space = line.rfind(' ', begin + kColumns);
    if (space == std::string::npos || space <= begin) break;
    text += line.substr(begin, space - begin) + "\n";
    begin = space + 1;
  }
  return text + line.substr(begin);
}

std::string link(const Descriptor& message) {
  std::string anchor = message.name();
  std::transform(anchor.begin(), anchor.end(), anchor.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return fmt::format("[{}](#{})", message.name(), anchor);
}

std::string type_text(const FieldDescriptor& field) {
  const std::string list = field.is_repeated() ? "list of " : "";
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return list + link(*field.message_type());
    case FieldDescriptor::CPPTYPE_ENUM:
      return list + "choice";
    default:
      return list + field.type_name();
  }
}

std::string default_text(const FieldDescriptor& field) {
  if (field.is_repeated() || field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) return "";
  // The program's own descriptor of the same field: only messages of its type can print the value.
  const FieldDescriptor& own =
      *DescriptorPool::generated_pool()->FindFieldByName(field.full_name());
  const auto* empty =
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(own.containing_type());
  std::string text;
  google::protobuf::TextFormat::PrintFieldValueToString(*empty, &own, -1, &text);
  return "`" + text + "`";
}

std::string meaning(const FieldDescriptor& field) {
  std::string text = comment(field);
  if (text.empty() && field.message_type() != nullptr) text = comment(*field.message_type());
  const EnumDescriptor* type = field.enum_type();
  for (int i = 0; type != nullptr && i < type->value_count(); ++i) {
    const std::string about = comment(*type->value(i));
    text += fmt::format("{}`{}`{}{}", text.empty() && i == 0 ? "" : "<br>", type->value(i)->name(),
                        about.empty() ? "" : ": ", about);
  }
  if (type != nullptr && comment(field).empty()) {
    const std::string about = comment(*type);
    if (!about.empty()) text = about + "<br>" + text;
  }
  const auto& options = field.options();
  for (int i = 0; i < options.ExtensionSize(configs::needs); ++i) {
    text +=
        fmt::format("<br>No effect {}.", condition_text(options.GetExtension(configs::needs, i)));
  }
  return text;
}

class Writer {
 public:
  std::string write(const Descriptor& config, const Descriptor& site) {
    section(config, false);
    text_ += kSites;
    of_run_ = false;
    section(site, false);
    return std::move(text_);
  }

 private:
  void section(const Descriptor& message, bool fixed) {
    if (!written_.insert(message.full_name()).second) return;
    text_ += fmt::format("\n## {}\n\n", message.name());
    if (const std::string about = comment(message); !about.empty())
      text_ += wrapped(about) + "\n\n";
    // A oneof of one field is an option.
    if (message.oneof_decl_count() > 0 && message.oneof_decl(0)->field_count() > 1) {
      const auto& choice = *message.oneof_decl(0);
      text_ += choice.field_count() == message.field_count()
                   ? "One of:\n\n"
                   : wrapped(fmt::format("One of `{}`, and the other fields:",
                                         fmt::join(oneof_names(choice), "`, `"))) +
                         "\n\n";
    }
    text_ += fmt::format("| field | type | default | range |{} meaning |\n",
                         of_run_ ? " on resume |" : "");
    text_ += fmt::format("|---|---|---|---|{}---|\n", of_run_ ? "---|" : "");
    for (int i = 0; i < message.field_count(); ++i) {
      if (!message.field(i)->options().GetExtension(configs::replaced))
        row(*message.field(i), fixed);
    }
    for (int i = 0; i < message.field_count(); ++i) {
      const FieldDescriptor& field = *message.field(i);
      if (field.message_type() == nullptr) continue;
      section(*field.message_type(), fixed || field.options().GetExtension(configs::fixed));
    }
  }

  void row(const FieldDescriptor& field, bool fixed) {
    const std::string range = range_text(field);
    const char* evaluation = field.options().GetExtension(configs::evaluation) ? ", eval" : "";
    const std::string resume =
        of_run_ ? fmt::format(" {}{} |", on_resume(field, fixed), evaluation) : "";
    text_ += fmt::format("| `{}` | {} | {} | {} |{} {} |\n", field.name(), type_text(field),
                         default_text(field), range, resume, meaning(field));
  }

  static const char* on_resume(const FieldDescriptor& field, bool fixed) {
    if (fixed || field.options().GetExtension(configs::fixed)) return "fixed";
    return field.options().GetExtension(configs::fixed_choice) ? "choice fixed" : "free";
  }

  std::string text_ = kIntroduction;
  bool of_run_ = true;  // fields of a configuration, which a run keeps
  std::set<std::string> written_;
};

}  // namespace

std::string config_reference() {
  const SchemaSource schema;
  return Writer().write(schema.message(*configs::Config::descriptor()),
                        schema.message(*configs::Site::descriptor()));
}

}  // namespace birkhoff
