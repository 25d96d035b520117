#include "tests/launcher/bad_input/damage.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "cluster/base/files/checksum.h"
#include "configs/loader/checksummed_json.h"
#include "configs/schema/checkpoint_manifest.pb.h"
#include "configs/schema/corpus_manifest.pb.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("the damage is not possible: " + what);
}

std::size_t offset_in(const std::string& bytes, std::int64_t offset) {
  const std::int64_t size = static_cast<std::int64_t>(bytes.size());
  const std::int64_t at = offset < 0 ? size + offset : offset;
  expect(at >= 0 && at < size, "no byte " + std::to_string(offset));
  return static_cast<std::size_t>(at);
}

configs::CorpusManifest read_manifest(const std::string& folder) {
  configs::CorpusManifest manifest;
  parse_checksummed_json(read_bytes(folder + "/manifest.json"), Checksum::kOptional, manifest);
  return manifest;
}

configs::CorpusManifest::Shard& first_shard(configs::CorpusManifest& manifest,
                                            const std::string& split) {
  for (auto& entry : *manifest.mutable_split()) {
    if (entry.name() == split) return *entry.mutable_stream(0)->mutable_shard(0);
  }
  throw std::runtime_error("no split " + split);
}

std::string file_hash(const std::string& bytes) { return xxh3_hex(bytes.data(), bytes.size()); }

// Writes `bytes` at `offset` of the split's first shard and makes page table, hash and manifest
// match.
void forge_shard(const std::string& folder, const std::string& split, std::int64_t offset,
                 const std::string& bytes) {
  edit_corpus(folder, [&](configs::CorpusManifest& manifest) {
    configs::CorpusManifest::Shard& shard = first_shard(manifest, split);
    const std::string path = folder + "/" + shard.file();
    std::string file = read_bytes(path);
    file.replace(static_cast<std::size_t>(offset), bytes.size(), bytes);
    std::string table;
    const auto add_pages = [&](std::int64_t begin, std::int64_t size) {
      const std::int64_t page_bytes = shard_format::page_bytes(shard);
      for (std::int64_t at = 0; at < size; at += page_bytes) {
        const std::uint32_t crc = crc32c(file.data() + begin + at,
                                         static_cast<std::size_t>(std::min(page_bytes, size - at)));
        table.append(reinterpret_cast<const char*>(&crc), sizeof crc);
      }
    };
    add_pages(shard.values_offset(), shard.values_bytes());
    add_pages(shard.documents_offset(), shard.documents_bytes());
    expect(static_cast<std::int64_t>(table.size()) == shard.page_crcs_bytes(),
           "page table of " + path);
    file.replace(static_cast<std::size_t>(shard.page_crcs_offset()), table.size(), table);
    shard.set_page_crcs_crc(crc32c(table.data(), table.size()));
    shard.set_hash(file_hash(file));
    write_bytes(path, file);
  });
}

}  // namespace

std::string read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  expect(in.good(), "cannot read " + path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_bytes(const std::string& path, const std::string& bytes) {
  if (fs::path(path).has_parent_path()) fs::create_directories(fs::path(path).parent_path());
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << bytes;
  out.close();
  expect(out.good(), "cannot write " + path);
}

void remove_one(const std::string& path) { expect(fs::remove_all(path) > 0, "no " + path); }

void truncate_to(const std::string& path, std::int64_t bytes) {
  const std::string old = read_bytes(path);
  expect(bytes < static_cast<std::int64_t>(old.size()), path + " is no longer than that");
  write_bytes(path, old.substr(0, static_cast<std::size_t>(bytes)));
}

void append_bytes(const std::string& path, const std::string& bytes) {
  write_bytes(path, read_bytes(path) + bytes);
}

void flip_bit(const std::string& path, std::int64_t offset) {
  std::string bytes = read_bytes(path);
  bytes[offset_in(bytes, offset)] ^= 0x10;
  write_bytes(path, bytes);
}

void replace_text(const std::string& path, const std::string& from, const std::string& to) {
  std::string bytes = read_bytes(path);
  const std::size_t at = bytes.find(from);
  expect(at != std::string::npos, "no '" + from + "' in " + path);
  write_bytes(path, bytes.replace(at, from.size(), to));
}

void swap_files(const std::string& a, const std::string& b) {
  const std::string bytes = read_bytes(a);
  expect(bytes != read_bytes(b), a + " equals " + b);
  write_bytes(a, read_bytes(b));
  write_bytes(b, bytes);
}

void edit_json(const std::string& path, const std::function<void(nlohmann::ordered_json&)>& edit) {
  auto json = nlohmann::ordered_json::parse(read_bytes(path));
  const auto old = json;
  edit(json);
  expect(json != old, path + " stays as it is");
  write_bytes(path, json.dump(1));
}

void edit_corpus(const std::string& folder,
                 const std::function<void(configs::CorpusManifest&)>& edit) {
  configs::CorpusManifest manifest = read_manifest(folder);
  edit(manifest);
  write_bytes(folder + "/manifest.json", manifest_json(manifest));
}

std::string shard_file(const std::string& folder, const std::string& split) {
  auto manifest = read_manifest(folder);
  return folder + "/" + first_shard(manifest, split).file();
}

void accept_shard(const std::string& folder, const std::string& split) {
  edit_corpus(folder, [&](configs::CorpusManifest& manifest) {
    configs::CorpusManifest::Shard& shard = first_shard(manifest, split);
    shard.set_hash(file_hash(read_bytes(folder + "/" + shard.file())));
  });
}

void accept_tokenizer(const std::string& folder, const std::string& content) {
  edit_corpus(folder, [&](configs::CorpusManifest& manifest) {
    write_bytes(folder + "/" + manifest.tokenizer().file(), content);
    manifest.mutable_tokenizer()->set_hash(file_hash(content));
  });
}

void forge_ids(const std::string& folder, const std::string& split, std::int64_t from,
               std::uint32_t id, std::int64_t count) {
  auto manifest = read_manifest(folder);
  const auto& shard = first_shard(manifest, split);
  const std::int64_t width = shard.values_bytes() / shard.elements();
  expect(width == 4 || id >> (8 * width) == 0, "the type of the ids holds " + std::to_string(id));
  std::string bytes;
  for (std::int64_t i = 0; i < count; ++i)
    bytes.append(reinterpret_cast<const char*>(&id), static_cast<std::size_t>(width));
  forge_shard(folder, split, shard.values_offset() + width * from, bytes);
}

void forge_document_end(const std::string& folder, const std::string& split, std::int64_t index,
                        std::uint64_t end) {
  auto manifest = read_manifest(folder);
  const auto& shard = first_shard(manifest, split);
  expect(index < shard.documents(), "no document end " + std::to_string(index));
  forge_shard(folder, split, shard.documents_offset() + 8 * index,
              std::string(reinterpret_cast<const char*>(&end), sizeof end));
}

void accept_file(const std::string& folder, const std::string& file) {
  edit_checkpoint(folder, [&](configs::CheckpointManifest& manifest) {
    for (auto& entry : *manifest.mutable_file()) {
      if (folder + "/" + entry.name() != file) continue;
      const std::string bytes = read_bytes(file);
      entry.set_bytes(static_cast<std::int64_t>(bytes.size()));
      entry.set_hash(file_hash(bytes));
      return;
    }
    expect(false, file + " is not in the manifest");
  });
}

std::string checkpoint_file(const std::string& folder, const std::string& start) {
  std::string found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(start, 0) == 0 && (found.empty() || name < found)) found = name;
  }
  expect(!found.empty(), "no " + start + "* in " + folder);
  return folder + "/" + found;
}

Tree read_tree() {
  Tree tree;
  for (const auto& entry : fs::recursive_directory_iterator(".")) {
    if (!entry.is_symlink() && entry.is_regular_file())
      tree[entry.path().lexically_normal().string()] = read_bytes(entry.path().string());
  }
  return tree;
}

std::string lost_files(const Tree& before, const Tree& after, bool train) {
  std::string lost;
  for (const auto& [path, bytes] : before) {
    const auto found = after.find(path);
    if (found != after.end() && found->second == bytes) continue;
    if (train && path.find("/holder-") != std::string::npos) continue;  // the next job has its own
    if (train &&
        (path.find("/log/") != std::string::npos || path.ends_with("/lock") ||
         path.ends_with("/config.txtpb") || path.ends_with("/status.json")) &&
        found != after.end())
      continue;
    // The end of a job is noted.
    if (train && path.ends_with("/history.jsonl") && found != after.end() &&
        found->second.starts_with(bytes))
      continue;
    if (const std::size_t step = path.find("checkpoints/step-");
        train && found == after.end() && step != std::string::npos) {
      const auto is_aside = [&](const std::string& prefix) {
        const auto renamed = after.find(path.substr(0, step) + "checkpoints/" + prefix + "step-" +
                                        path.substr(step + sizeof("checkpoints/step-") - 1));
        return renamed != after.end() && renamed->second == bytes;
      };
      if (is_aside("damaged-") || is_aside("diverged-")) continue;
    }
    lost += path + (found == after.end() ? " is gone; " : " is changed; ");
  }
  return lost;
}

}  // namespace birkhoff
