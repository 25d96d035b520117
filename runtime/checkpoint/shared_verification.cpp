#include "runtime/checkpoint/shared_verification.h"

#include <fmt/format.h>

#include <sstream>
#include <vector>

#include "cluster/base/error.h"
#include "runtime/checkpoint/tensor_part.h"
#include "runtime/checkpoint/verify.h"

namespace birkhoff {
namespace {

constexpr char kPath[] = "checkpoint to verify";
constexpr char kManifest[] = "manifest to verify";

// "FILE CODE TEXT", where the text may hold anything; empty if nothing was found.
std::string message_of(const FileFinding& finding) {
  if (finding.file < 0) return "";
  return fmt::format("{} {} {}", finding.file, static_cast<int>(finding.code), finding.text);
}

FileFinding finding_of(const std::string& message) {
  FileFinding finding;
  if (message.empty()) return finding;
  std::istringstream in(message);
  int code = 0;
  in >> finding.file >> code;
  finding.code = static_cast<ExitCode>(code);
  in.get();
  finding.text = message.substr(static_cast<std::size_t>(in.tellg()));
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

// Each rank stops at the first damaged file of its share, so the first of these is the first of
// all.
std::string SharedVerification::verify_together(const CheckpointFolder& checkpoint) {
  std::vector<std::int64_t> bytes;
  for (const auto& file : checkpoint.manifest.file()) bytes.push_back(file.bytes());
  const std::vector<int> readers = balanced_owners(bytes, world_.size());
  std::vector<int> files;
  for (int file = 0; file < checkpoint.manifest.file_size(); ++file) {
    if (readers[static_cast<std::size_t>(file)] == world_.rank()) files.push_back(file);
  }
  const FileFinding mine = verify_some_files(checkpoint, files);
  FileFinding first;
  for (const std::string& message :
       world_.all_gather_bytes(message_of(mine), "verified checkpoint files")) {
    const FileFinding finding = finding_of(message);
    const bool damaged = finding.code != ExitCode::kOk;
    const bool earlier = first.file < 0 || finding.file < first.file;
    if (finding.file < 0) continue;
    if (damaged == (first.code != ExitCode::kOk) ? earlier : damaged) first = finding;
  }
  if (first.code != ExitCode::kOk) throw Error(first.code, first.text);
  return first.text;
}

}  // namespace birkhoff
