#include "configs/loader/checksummed_json.h"

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>

#include <stdexcept>
#include <string_view>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"

namespace birkhoff {
namespace {

constexpr std::string_view kPrefix = "{\"checksum\":\"";
constexpr std::string_view kSuffix = "\",";
constexpr std::size_t kHashDigits = 32;
constexpr std::size_t kHeadBytes = kPrefix.size() + kHashDigits + kSuffix.size();

std::string head_of(std::string_view covered) {
  return fmt::format("{}{}{}", kPrefix, xxh3_hex(covered.data(), covered.size()), kSuffix);
}

}  // namespace

std::string checksummed_json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  require(status.ok() && json.starts_with("{\n"), "a manifest has a JSON form");
  const std::string covered = json.substr(1);  // without the brace, which the head contains
  return head_of(covered) + covered;
}

void parse_checksummed_json(const std::string& text, Checksum checksum,
                            google::protobuf::Message& message) {
  std::string json = text;
  if (checksum == Checksum::kRequired || text.starts_with(kPrefix)) {
    const std::string_view covered =
        std::string_view(text).substr(std::min(kHeadBytes, text.size()));
    reject_if(!text.starts_with(head_of(covered)), "its checksum does not match its content");
    json = fmt::format("{{{}", covered);
  }
  const auto status = google::protobuf::util::JsonStringToMessage(json, &message);
  reject_if(!status.ok(), "{}", std::string_view(status.message().data(), status.message().size()));
}

}  // namespace birkhoff
