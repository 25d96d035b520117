// `average` and `export`: folders with the weights of checkpoints and without optimizer state.
#include <filesystem>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "launcher/commands.h"
#include "launcher/runs/run_paths.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/weights/average.h"

namespace birkhoff {
namespace {

void require_new_folder(const std::string& out) {
  std::error_code error;
  if (std::filesystem::exists(out, error) && !std::filesystem::is_empty(out, error))
    fail(ExitCode::kUsage, "--out {}: exists and is not an empty folder; name a new one", out);
}

}  // namespace

int average_command(const AverageArguments& arguments, std::ostream& out) {
  if (kind_of(arguments.run) != PathKind::kRun) {
    fail(ExitCode::kUsage, "{}: is no run folder; name one, with several checkpoints",
         arguments.run);
  }
  std::vector<std::filesystem::path> folders = checkpoints_of(arguments.run);
  if (std::ssize(folders) < arguments.last) {
    fail(ExitCode::kUsage,
         "--last {}: {} holds {}; ask for fewer, or train with a larger checkpoint.keep",
         arguments.last, arguments.run, counted(std::ssize(folders), "checkpoint"));
  }
  folders.erase(folders.begin(), folders.end() - arguments.last);
  require_new_folder(arguments.out);
  std::vector<CheckpointFolder> checkpoints;
  for (const std::filesystem::path& folder : folders) {
    checkpoints.push_back(open_checkpoint(folder));
    verify_checkpoint(checkpoints.back());
  }
  const std::filesystem::path written =
      average_checkpoints(checkpoints, RunPaths{arguments.out}.checkpoints());
  out << fmt::format("{}: the mean of {}, steps {} to {}\n", written.string(),
                     counted(arguments.last, "checkpoint"), checkpoints.front().manifest.step(),
                     checkpoints.back().manifest.step());
  return 0;
}

int export_command(const ExportArguments& arguments, std::ostream& out) {
  require_new_folder(arguments.out);
  const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
  verify_checkpoint(checkpoint);
  const std::filesystem::path written =  // the mean of one checkpoint is its weights, to the bit
      average_checkpoints({checkpoint}, RunPaths{arguments.out}.checkpoints());
  out << fmt::format("{}: the weights of step {}\n", written.string(), checkpoint.manifest.step());
  return 0;
}

}  // namespace birkhoff
