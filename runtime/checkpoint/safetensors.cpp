#include "runtime/checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "cluster/base/error.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
constexpr std::int64_t kDataAlignment = 64;
constexpr int kMaxNesting = 8;  // the header needs 3: object, tensor, list

struct Dtype {
  std::string_view name;
  c10::ScalarType type;
};
constexpr Dtype kDtypes[] = {{"F64", c10::ScalarType::Double},    {"F32", c10::ScalarType::Float},
                             {"BF16", c10::ScalarType::BFloat16}, {"F16", c10::ScalarType::Half},
                             {"I64", c10::ScalarType::Long},      {"I32", c10::ScalarType::Int},
                             {"U8", c10::ScalarType::Byte}};

// Bytes of a tensor, or -1 if the shape is negative or overflows 64 bits.
std::int64_t tensor_bytes(const SafetensorsEntry& entry) {
  std::int64_t bytes = safetensors_element_bytes(entry.dtype);
  for (const std::int64_t size : entry.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      return -1;
    }
  }
  return bytes;
}

// nlohmann's parser accepts any depth and keeps the last of duplicate keys; both would hide a
// hostile or damaged header.
nlohmann::json parse_strict_json(const std::string& text) {
  std::vector<std::set<std::string>> keys;  // of the open objects
  return nlohmann::json::parse(
      text, [&keys](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
        using Event = nlohmann::json::parse_event_t;
        reject_if(depth > kMaxNesting, "nested deeper than {}", kMaxNesting);
        if (event == Event::object_start) {
          keys.emplace_back();
        } else if (event == Event::object_end) {
          keys.pop_back();
        } else if (event == Event::key) {
          const auto key = parsed.get<std::string>();
          reject_if(!keys.back().insert(key).second, "key '{}' occurs twice", key);
        }
        return true;
      });
}

std::int64_t non_negative_integer(const nlohmann::json& value, const char* what) {
  // A number beyond 64 bits becomes a float, and one beyond int64 stays unsigned: both are rejected
  // here.
  reject_if(!value.is_number_unsigned() ||
                value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX),
            "{} is not an integer in [0, 2^63)", what);
  return value.get<std::int64_t>();
}

SafetensorsEntry parse_entry(const std::string& name, const nlohmann::json& value) {
  reject_if(!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
                !value.contains("shape") || !value.contains("data_offsets"),
            "it needs exactly dtype, shape and data_offsets");
  SafetensorsEntry entry;
  entry.name = name;
  reject_if(!value["dtype"].is_string() ||
                safetensors_element_bytes(value["dtype"].get<std::string>()) == 0,
            "dtype {} is not one of F64, F32, BF16, I64, U8", value["dtype"].dump());
  entry.dtype = value["dtype"].get<std::string>();
  reject_if(!value["shape"].is_array(), "shape is not a list");
  for (const auto& size : value["shape"]) {
    entry.shape.push_back(non_negative_integer(size, "a size"));
  }
  const auto& offsets = value["data_offsets"];
  reject_if(!offsets.is_array() || offsets.size() != 2, "data_offsets is not a list of two");
  entry.begin = non_negative_integer(offsets[0], "a data offset");
  entry.end = non_negative_integer(offsets[1], "a data offset");
  const std::int64_t bytes = tensor_bytes(entry);
  reject_if(bytes < 0 || entry.end < entry.begin || entry.num_bytes() != bytes,
            "data_offsets [{}, {}] do not fit dtype and shape", entry.begin, entry.end);
  return entry;
}

[[noreturn]] void fail_file(const std::string& path, const std::string& why) {
  fail(ExitCode::kCheckpoint,
       "{}: not a sound safetensors file: {}; use another checkpoint or copy the file again", path,
       printable(why));
}

}  // namespace

std::int64_t safetensors_element_bytes(const std::string& dtype) {
  const auto* found = std::ranges::find(kDtypes, dtype, &Dtype::name);
  return found == std::end(kDtypes) ? 0 : static_cast<std::int64_t>(c10::elementSize(found->type));
}

std::string safetensors_dtype(c10::ScalarType type) {
  const auto* found = std::ranges::find(kDtypes, type, &Dtype::type);
  if (found != std::end(kDtypes)) return std::string(found->name);
  fail(ExitCode::kInternal, "internal error: no safetensors dtype for {}", c10::toString(type));
}

c10::ScalarType safetensors_scalar_type(const std::string& dtype) {
  const auto* found = std::ranges::find(kDtypes, dtype, &Dtype::name);
  require(found != std::end(kDtypes), "a dtype of safetensors_dtype()");
  return found->type;
}

std::string safetensors_header(std::vector<SafetensorsEntry>& entries,
                               const SafetensorsMetadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    header["__metadata__"] = metadata;
  }
  std::int64_t data_bytes = 0;
  for (SafetensorsEntry& entry : entries) {
    const std::int64_t bytes = tensor_bytes(entry);
    require(bytes >= 0 && safetensors_element_bytes(entry.dtype) > 0,
            "a tensor no safetensors file can hold");
    require(entry.name != "__metadata__" && !header.contains(entry.name),
            "tensor names must differ");
    entry.begin = data_bytes;
    entry.end = data_bytes += bytes;
    header[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = header.dump();
  const auto unpadded = static_cast<std::int64_t>(text.size()) + kLengthBytes;
  text.append(
      static_cast<std::size_t>((kDataAlignment - unpadded % kDataAlignment) % kDataAlignment), ' ');
  require(static_cast<std::int64_t>(text.size()) <= kMaxHeaderBytes,
          "safetensors header above 100 MB");
  const std::uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                                     const SafetensorsMetadata& metadata)
    : file_(File::create(path)) {
  const std::string header = safetensors_header(entries, metadata);
  expected_bytes_ =
      static_cast<std::int64_t>(header.size()) + (entries.empty() ? 0 : entries.back().end);
  write(header.data(), header.size());
}

void SafetensorsWriter::write(const void* data, std::size_t num_bytes) {
  file_.write_all(data, num_bytes);
  hasher_.update(data, num_bytes);
  written_bytes_ += static_cast<std::int64_t>(num_bytes);
}

void SafetensorsWriter::finish() {
  require(written_bytes_ == expected_bytes_, "safetensors data differs in size from its header");
  file_.sync();
  file_.close();
}

SafetensorsReader::SafetensorsReader(const std::string& path)
    : file_(File::open_for_read(path, ExitCode::kCheckpoint)) {
  const std::int64_t file_bytes = file_.size();
  if (file_bytes < kLengthBytes) {
    fail_file(path, fmt::format("{} bytes are too few for a header", file_bytes));
  }
  std::uint64_t header_bytes = 0;
  file_.pread_exact(&header_bytes, sizeof header_bytes, 0);
  if (header_bytes >
      static_cast<std::uint64_t>(std::min(kMaxHeaderBytes, file_bytes - kLengthBytes))) {
    fail_file(path, fmt::format("header of {} bytes in a file of {}", header_bytes, file_bytes));
  }
  data_offset_ = kLengthBytes + static_cast<std::int64_t>(header_bytes);
  data_bytes_ = file_bytes - data_offset_;
  std::string text(header_bytes, '\0');
  file_.pread_exact(text.data(), text.size(), kLengthBytes);
  try {
    parse_header(text);
  } catch (const std::invalid_argument& error) {
    fail_file(path, error.what());
  } catch (const nlohmann::json::exception& error) {
    fail_file(path, fmt::format("its header is not JSON: {}", error.what()));
  }
}

void SafetensorsReader::parse_header(const std::string& json_text) {
  reject_if(json_text.empty() || json_text.front() != '{', "its header does not begin with '{{'");
  const nlohmann::json header = parse_strict_json(json_text);
  for (const auto& [name, value] : header.items()) {
    try {
      if (name != "__metadata__") {
        entries_.push_back(parse_entry(name, value));
        continue;
      }
      reject_if(!value.is_object(), "it is not an object");
      for (const auto& [key, text] : value.items()) {
        reject_if(!text.is_string(), "value of '{}' is not a string", key);
        metadata_[key] = text.get<std::string>();
      }
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(fmt::format("'{}': {}", name, error.what()));
    }
  }
  // An empty tensor comes before the one that begins at the same offset.
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::int64_t expected = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    reject_if(entries_[i].begin != expected,
              "'{}' begins at byte {} of the data, where the one before it ends at {}",
              entries_[i].name, entries_[i].begin, expected);
    expected = entries_[i].end;
    index_[entries_[i].name] = i;
  }
  reject_if(expected != data_bytes_, "its tensors end at byte {} of the data, the file at {}",
            expected, data_bytes_);
}

const SafetensorsEntry* SafetensorsReader::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

void SafetensorsReader::read(void* out, std::size_t num_bytes, std::int64_t offset) const {
  require(offset >= 0 && offset <= data_bytes_ &&
              static_cast<std::int64_t>(num_bytes) <= data_bytes_ - offset,
          "reading past the data of a safetensors file");
  file_.pread_exact(out, num_bytes, data_offset_ + offset);
}

std::string SafetensorsReader::header_bytes() const {
  std::string bytes(static_cast<std::size_t>(data_offset_), '\0');
  file_.pread_exact(bytes.data(), bytes.size(), 0);
  return bytes;
}

}  // namespace birkhoff
