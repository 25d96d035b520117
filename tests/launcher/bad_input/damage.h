// Ways to spoil the files of the good input. Paths are relative to the working directory. A
// function that changes nothing throws: a table row must not pass because a file's name or content
// has changed.
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
void write_bytes(const std::string& path, const std::string& bytes);  // creates missing folders

void remove_one(const std::string& path);  // a file, or a folder with its contents
void truncate_to(const std::string& path, std::int64_t bytes);
void append_bytes(const std::string& path, const std::string& bytes);
void flip_bit(const std::string& path, std::int64_t offset);  // a negative one counts from the end
void replace_text(const std::string& path, const std::string& from, const std::string& to);
void swap_files(const std::string& a, const std::string& b);

// Edits a JSON file and leaves its checksums unchanged.
void edit_json(const std::string& path, const std::function<void(nlohmann::ordered_json&)>& edit);

// Edits the corpus' manifest and recomputes its fingerprint and checksum, so that no checksum of
// the manifest reveals the damage.
void edit_corpus(const std::string& folder,
                 const std::function<void(configs::CorpusManifest&)>& edit);
// Returns the file of the first shard of the split's stream.
std::string shard_file(const std::string& folder, const std::string& split);
// Sets that shard's hash to the file's.
void accept_shard(const std::string& folder, const std::string& split);
// Writes the tokenizer's file and sets its hash.
void accept_tokenizer(const std::string& folder, const std::string& content);
// Overwrites ids of that shard and makes every checksum match again.
void forge_ids(const std::string& folder, const std::string& split, std::int64_t from,
               std::uint32_t id, std::int64_t count);
// The same for the shard's document ends (u64).
void forge_document_end(const std::string& folder, const std::string& split, std::int64_t index,
                        std::uint64_t end);

// Edits the checkpoint's manifest and recomputes its checksum.
void edit_checkpoint(const std::string& folder,
                     const std::function<void(configs::CheckpointManifest&)>& edit);
// Updates size and hash in that manifest's entry for `file`.
void accept_file(const std::string& folder, const std::string& file);
// Writes `value` over the first numbers (F32) of the tensor in that file and makes every checksum
// match again: a valid checkpoint with other values.
void forge_tensor(const std::string& folder, const std::string& file, const std::string& tensor,
                  float value, std::int64_t count);
// Returns the first file of the checkpoint whose name starts with `start`.
std::string checkpoint_file(const std::string& folder, const std::string& start);

// Content of every file below the working directory, by path.
using Tree = std::map<std::string, std::string>;
Tree read_tree();
// Returns a line about the files of `before` that are not in `after` with the same content; empty
// if there are none. With `train`, files that every start of a run writes (lock, logs, status) may
// differ, its history may grow, and a damaged checkpoint may have been renamed to damaged-step-N,
// one of a diverged run to diverged-step-N.
std::string lost_files(const Tree& before, const Tree& after, bool train);

}  // namespace birkhoff
