// Ways to spoil the files of the good input. Paths are relative to the working directory. A damage
// that changes nothing throws: a row of a table must not pass because a file has another name or
// content than it once had.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace birkhoff {

namespace configs {
class CheckpointManifest;
class CorpusManifest;
}  // namespace configs

std::string read_bytes(const std::string& path);
void write_bytes(const std::string& path, const std::string& bytes);  // makes missing folders

void remove_one(const std::string& path);  // a file, or a folder with all it holds
void truncate_to(const std::string& path, std::int64_t bytes);
void append_bytes(const std::string& path, const std::string& bytes);
void flip_bit(const std::string& path, std::int64_t offset);  // a negative one counts from the end
void replace_text(const std::string& path, const std::string& from, const std::string& to);
void swap_files(const std::string& a, const std::string& b);

// Of a JSON file as it is, checksums left alone.
void edit_json(const std::string& path, const std::function<void(nlohmann::ordered_json&)>& edit);

// The corpus' manifest with its fingerprint and checksum made anew: damage that no checksum of the
// manifest tells.
void edit_corpus(const std::string& folder,
                 const std::function<void(configs::CorpusManifest&)>& edit);
// The file of the first shard of the split's stream.
std::string shard_file(const std::string& folder, const std::string& split);
// Sets that shard's hash to the file's.
void accept_shard(const std::string& folder, const std::string& split);
// Writes the tokenizer's file and sets its hash.
void accept_tokenizer(const std::string& folder, const std::string& content);
// Overwrites values (u16) of that shard and makes every checksum fit again.
void forge_ids(const std::string& folder, const std::string& split, std::int64_t from,
               std::uint16_t id, std::int64_t count);
// The same for the shard's document ends (u64).
void forge_document_end(const std::string& folder, const std::string& split, std::int64_t index,
                        std::uint64_t end);

// The checkpoint's manifest with its checksum made anew.
void edit_checkpoint(const std::string& folder,
                     const std::function<void(configs::CheckpointManifest&)>& edit);
// Of that manifest's entry for `file`: size and hash, as they are now.
void accept_file(const std::string& folder, const std::string& file);
// Writes `value` over the first numbers (F32) of the tensor in that file and makes every checksum
// fit again: a sound checkpoint of other values.
void forge_tensor(const std::string& folder, const std::string& file, const std::string& tensor,
                  float value, std::int64_t count);
// The first file of the checkpoint whose name starts so.
std::string checkpoint_file(const std::string& folder, const std::string& start);

// Content of every file below the working directory, by path.
using Tree = std::map<std::string, std::string>;
Tree read_tree();
// What of `before` is not in `after` with the same content, as a line for the message; empty if
// nothing is. With `train`, files that every start of a run writes (lock, logs) may differ, and a
// damaged checkpoint may have been renamed to damaged-step-N, one of a diverged run to
// diverged-step-N.
std::string lost_files(const Tree& before, const Tree& after, bool train);

}  // namespace birkhoff
