// The safetensors file format (github.com/huggingface/safetensors), which Python's tools load: 8
// bytes of little-endian header length, a JSON header, and the tensors' bytes one after another.
// The header is padded with spaces so that the data starts at a multiple of 64 bytes. Integers and
// floats are little-endian, as on every machine we run on.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"

namespace birkhoff {

// "F64", "F32", "BF16", "F16", "I64", "I32" or "U8"; other types: Error(kInternal).
std::string safetensors_dtype(c10::ScalarType type);

// The reverse.
c10::ScalarType safetensors_scalar_type(const std::string& dtype);

// Bytes of an element; 0 for any other dtype.
std::int64_t safetensors_element_bytes(const std::string& dtype);

struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;  // [] is a scalar
  // Bytes from the start of the data section; set by writer and reader.
  std::int64_t begin = 0, end = 0;

  std::int64_t num_bytes() const { return end - begin; }
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// Everything before the data of a file with these tensors, in this order: length, JSON and padding.
// Sets their offsets. Order them by element size, largest first, because readers want tensors
// aligned to their element size. Names must differ.
std::string safetensors_header(std::vector<SafetensorsEntry>& entries,
                               const SafetensorsMetadata& metadata);

// Writes a new file front to back. Local. Errors: Error(kStorage).
class SafetensorsWriter {
 public:
  // Creates the file and writes its safetensors_header().
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                    const SafetensorsMetadata& metadata);
  // Writes the next bytes of the data: tensors in the order of `entries`, in pieces of any size.
  void write(const void* data, std::size_t num_bytes);
  // Call when all data is written: syncs and closes the file.
  void finish();
  // Of the whole file, after finish().
  std::int64_t num_bytes() const { return written_bytes_; }
  std::string hash() const { return hasher_.hex_digest(); }

 private:
  File file_;
  Xxh3Hasher hasher_;
  std::int64_t written_bytes_ = 0, expected_bytes_ = 0;
};

// Reads a file that may be damaged or hostile: every size is checked against the file's before
// anything is allocated. Accepted: a header of at most 100 MB, one JSON object without duplicate
// keys, known dtypes, and data offsets that cover the rest of the file without holes or overlaps.
// Errors: Error(kCheckpoint) with the file and the tensor. Local.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);

  // In the order of their data.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // nullptr if no tensor has that name.
  const SafetensorsEntry* find(const std::string& name) const;

  // Reads `num_bytes` bytes of the data section, starting at `offset`.
  void read(void* out, std::size_t num_bytes, std::int64_t offset) const;
  // Everything before the data: length, JSON and padding.
  std::string header_bytes() const;

 private:
  void parse_header(const std::string& json_text);

  File file_;
  std::int64_t data_offset_ = 0, data_bytes_ = 0;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t> index_;  // name to position in entries_
  SafetensorsMetadata metadata_;
};

}  // namespace birkhoff
