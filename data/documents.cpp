#include "data/documents.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "cluster/base/checksum.h"
#include "cluster/base/error.h"
#include "cluster/base/file.h"
#include "data/manifest.h"
#include "data/shard_format.h"
#include "data/utf8.h"

namespace birkhoff {
namespace {

// Whether a file is the manifest of a corpus, sound or not: its first field tells.
bool is_corpus_manifest(const std::string& path) {
  const File file = File::open_for_read(path, ExitCode::kData);
  std::string start(static_cast<std::size_t>(std::min<std::int64_t>(file.size(), 4096)), '\0');
  file.pread_exact(start.data(), start.size(), 0);
  return start.find(fmt::format("\"{}\"", shard_format::kManifestFormat)) != std::string::npos;
}

std::string modification_time(const struct stat& info) {
  return fmt::format("{}.{:09}", info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
}

std::string base_name(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

class Walk {
 public:
  Walk(const std::string& except, const std::function<void(const Document&)>& visit)
      : visit_(visit) {
    has_except_ = find_status(except, /*follow_links=*/true, &except_);
  }

  void argument(const InputPath& input) {
    if (!input.content_hash.empty())
      return file(input.path, input.name, input.content_bytes, input.content_hash);
    struct stat info;
    if (!find_status(input.path, /*follow_links=*/true, &info, ExitCode::kUsage)) {
      fail(ExitCode::kUsage, "{}: {}; give a file or folder that is there", input.path,
           std::strerror(errno));
    }
    if (S_ISDIR(info.st_mode)) {
      folder(input.path, "");
    } else {
      file(input.path, base_name(input.path), info.st_size, modification_time(info));
    }
  }

  InputScan finish() {
    scan_.hash = hasher_.hex_digest();
    return scan_;
  }

 private:
  void folder(const std::string& path, const std::string& prefix) {
    for (const std::string& name : list_directory(path, ExitCode::kData)) {
      const std::string inner = path + "/" + name;
      struct stat info;
      if (!find_status(inner, /*follow_links=*/false, &info, ExitCode::kData)) {
        fail(ExitCode::kData, "{}: has gone while the folder was read; start the command again",
             inner);
      }
      if (S_ISREG(info.st_mode)) {
        if (name == kManifestName && is_corpus_manifest(inner)) {
          fail(ExitCode::kUsage,
               "{}: is a corpus, not text; give the text that it was made from, or move it out of "
               "the input",
               path);
        }
        file(inner, prefix + name, info.st_size, modification_time(info));
      } else if (S_ISDIR(info.st_mode)) {
        const bool is_except =
            has_except_ && info.st_dev == except_.st_dev && info.st_ino == except_.st_ino;
        if (!is_except) folder(inner, prefix + name + "/");
      } else {
        ++scan_.not_regular;
      }
    }
  }

  // stamp: what tells that the content has changed.
  void file(const std::string& path, const std::string& name, std::int64_t bytes,
            const std::string& stamp) {
    // Lengths first, so that no two lists of names give the same text.
    const std::string entry = fmt::format("{}:{} {} {}\n", name.size(), name, bytes, stamp);
    hasher_.update(entry.data(), entry.size());
    if (bytes == 0) {
      ++scan_.empty_files;
      return;
    }
    if (scan_.keys.size() <= kMaxRanked) scan_.keys.push_back(document_key(name));
    ++scan_.documents;
    scan_.bytes += bytes;
    visit_({path, name, bytes});
  }

  const std::function<void(const Document&)>& visit_;
  struct stat except_;
  bool has_except_;
  Xxh3Hasher hasher_;
  InputScan scan_;
};

// The byte at which a fraction of a text ends, moved to the beginning of a character.
std::int64_t cut_at(const Document& document, double fraction) {
  auto position =
      static_cast<std::int64_t>(std::floor(fraction * static_cast<double>(document.bytes)));
  const File file = File::open_for_read(document.path, ExitCode::kData);
  for (int steps = 0; steps < 3 && position < document.bytes; ++steps, ++position) {
    unsigned char byte = 0;
    file.pread_exact(&byte, 1, position);
    if ((byte & 0xc0) != 0x80) break;
  }
  return position;
}

// fraction * 2^64, for fractions below 1.
std::uint64_t key_at(double fraction) {
  return static_cast<std::uint64_t>(std::ldexp(fraction, 64));
}

std::size_t cut_of(std::string_view text) {
  const std::size_t newline = text.rfind('\n');
  if (newline != std::string_view::npos) return newline + 1;
  const std::size_t space = text.rfind(' ');
  if (space != std::string_view::npos && space > 0) return space;
  const std::size_t whole = complete_utf8(text);
  return whole > 0 ? whole : text.size();
}

}  // namespace

std::uint64_t document_key(std::string_view name) {
  return std::stoull(xxh3_hex(name.data(), name.size()).substr(0, 16), nullptr, 16);
}

InputScan for_each_document(const std::vector<InputPath>& paths, const std::string& except,
                            const std::function<void(const Document&)>& visit) {
  Walk walk(except, visit);
  for (const InputPath& path : paths) walk.argument(path);
  return walk.finish();
}

SplitRule::SplitRule(const InputScan& scan, double valid_fraction, double test_fraction)
    : single_(scan.documents == 1), valid_fraction_(valid_fraction), test_fraction_(test_fraction) {
  if (single_) return;
  if (scan.keys.size() > kMaxRanked) {
    first_valid_key_ = key_at(test_fraction);
    first_train_key_ = key_at(test_fraction + valid_fraction);
    return;
  }
  std::vector<std::uint64_t> keys = scan.keys;
  std::sort(keys.begin(), keys.end());
  const auto share = [&](double fraction) {
    const double wanted = std::max(1.0, std::round(fraction * static_cast<double>(keys.size())));
    return fraction > 0 ? static_cast<std::size_t>(wanted) : 0;
  };
  const std::size_t num_test = share(test_fraction), num_valid = share(valid_fraction);
  const bool enough = num_test + num_valid < keys.size();
  if (enough) {
    first_valid_key_ = keys[num_test];
    first_train_key_ = keys[num_test + num_valid];
  }
  // Documents of one name (from two folders) have one key and stay together.
  const bool test_is_empty = num_test > 0 && keys.front() >= first_valid_key_;
  const bool valid_is_empty = num_valid > 0 && first_valid_key_ == first_train_key_;
  if (!enough || test_is_empty || valid_is_empty) {
    fail(ExitCode::kUsage,
         "{} documents do not fill the splits (--valid {} --test {}); give more files, a single "
         "one, or smaller fractions",
         scan.documents, valid_fraction, test_fraction);
  }
}

bool SplitRule::has(SplitIndex split) const {
  switch (split) {
    case kTrain:
      return true;
    case kValid:
      return valid_fraction_ > 0;
    case kTest:
      return test_fraction_ > 0;
  }
  require(false, "split");
  return false;
}

std::vector<Piece> SplitRule::pieces(const Document& document) const {
  if (!single_) {
    const std::uint64_t key = document_key(document.name);
    const SplitIndex split = key < first_valid_key_   ? kTest
                             : key < first_train_key_ ? kValid
                                                      : kTrain;
    return {{split, 0, document.bytes}};
  }
  const std::int64_t train_end = cut_at(document, 1 - valid_fraction_ - test_fraction_);
  const std::int64_t valid_end = has(kTest) ? cut_at(document, 1 - test_fraction_) : document.bytes;
  std::vector<Piece> pieces = {{kTrain, 0, train_end}};
  if (has(kValid)) pieces.push_back({kValid, train_end, valid_end});
  if (has(kTest)) pieces.push_back({kTest, valid_end, document.bytes});
  for (const Piece& piece : pieces) {
    if (piece.begin < piece.end) continue;
    fail(ExitCode::kUsage,
         "{}: {} bytes leave nothing for the {} split (--valid {} --test {}); give more text or "
         "other fractions",
         document.name, document.bytes, kSplitNames[piece.split], valid_fraction_, test_fraction_);
  }
  return pieces;
}

void for_each_chunk(const Document& document, const Piece& piece, std::int64_t chunk_bytes,
                    const std::function<void(std::string_view, std::int64_t)>& visit) {
  const File file = File::open_for_read(document.path, ExitCode::kData);
  std::vector<char> buffer;
  for (std::int64_t offset = piece.begin; offset < piece.end;) {
    const std::int64_t rest = piece.end - offset;
    buffer.resize(static_cast<std::size_t>(std::min(rest, chunk_bytes)));
    file.pread_exact(buffer.data(), buffer.size(), offset);
    std::string_view text(buffer.data(), buffer.size());
    if (rest > chunk_bytes) text = text.substr(0, cut_of(text));
    visit(text, offset);
    offset += static_cast<std::int64_t>(text.size());
  }
}

}  // namespace birkhoff
