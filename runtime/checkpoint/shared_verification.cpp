#include "runtime/checkpoint/shared_verification.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "cluster/base/error.h"
#include "runtime/checkpoint/verify.h"

namespace birkhoff {
namespace {

constexpr char kPath[] = "checkpoint to verify";
constexpr char kManifest[] = "manifest to verify";

// "FILE CODE TEXT", where the text may hold anything; empty if nothing was found.
std::string message_of(const FileFinding& finding) {
  if (finding.file < 0) return "";
  return fmt::format("{} {} {}{}", finding.file, static_cast<int>(finding.code), finding.error,
                     finding.non_finite);
}

FileFinding finding_of(const std::string& message) {
  FileFinding finding;
  if (message.empty()) return finding;
  std::istringstream in(message);
  int code = 0;
  in >> finding.file >> code;
  finding.code = static_cast<ExitCode>(code);
  in.get();
  (finding.code == ExitCode::kOk ? finding.non_finite : finding.error) =
      message.substr(static_cast<std::size_t>(in.tellg()));
  return finding;
}

}  // namespace

std::string SharedVerification::verify(const CheckpointFolder& checkpoint) {
  world_.broadcast_bytes(checkpoint.path.string(), 0, kPath);
  world_.broadcast_bytes(checkpoint.manifest.SerializeAsString(), 0, kManifest);
  return verify_together(checkpoint);
}

void SharedVerification::finish() { world_.broadcast_bytes("", 0, kPath); }

void SharedVerification::help() {
  while (true) {
    CheckpointFolder checkpoint;
    checkpoint.path = world_.broadcast_bytes("", 0, kPath);
    if (checkpoint.path.empty()) return;
    require(checkpoint.manifest.ParseFromString(world_.broadcast_bytes("", 0, kManifest)),
            "a manifest from rank 0");
    try {
      verify_together(checkpoint);
    } catch (const Error&) {
      // Rank 0 gets the same error, reports it, and names the next checkpoint.
    }
  }
}

std::vector<std::vector<int>> SharedVerification::shares(
    const configs::CheckpointManifest& manifest, int num_ranks) {
  std::vector<int> largest_first(static_cast<std::size_t>(manifest.file_size()));
  std::iota(largest_first.begin(), largest_first.end(), 0);
  std::ranges::stable_sort(largest_first, [&](int a, int b) {
    return manifest.file(a).bytes() > manifest.file(b).bytes();
  });
  std::vector<std::int64_t> load_bytes(static_cast<std::size_t>(num_ranks), 0);
  std::vector<std::vector<int>> files(static_cast<std::size_t>(num_ranks));
  for (const int file : largest_first) {
    const auto least = std::ranges::min_element(load_bytes);
    *least += manifest.file(file).bytes();
    files[static_cast<std::size_t>(least - load_bytes.begin())].push_back(file);
  }
  for (std::vector<int>& of_rank : files) std::ranges::sort(of_rank);
  return files;
}

// Each rank stops at the first damaged file of its share, so the first of these is the first of
// all.
std::string SharedVerification::verify_together(const CheckpointFolder& checkpoint) {
  const auto files = shares(checkpoint.manifest, world_.size());
  const FileFinding mine =
      verify_some_files(checkpoint, files[static_cast<std::size_t>(world_.rank())]);
  FileFinding first;
  for (const std::string& message :
       world_.all_gather_bytes(message_of(mine), "verified checkpoint files")) {
    const FileFinding finding = finding_of(message);
    const bool damaged = finding.code != ExitCode::kOk;
    const bool earlier = first.file < 0 || finding.file < first.file;
    if (finding.file < 0) continue;
    if (damaged == (first.code != ExitCode::kOk) ? earlier : damaged) first = finding;
  }
  if (first.code != ExitCode::kOk) throw Error(first.code, first.error);
  return first.non_finite;
}

}  // namespace birkhoff
