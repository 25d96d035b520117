#include "data/prepare/corpus_source.h"

#include <fmt/format.h>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/corpus.h"

namespace birkhoff {

std::vector<InputPath> inputs_of(const PrepareOptions& options) {
  std::vector<InputPath> inputs;
  // targets: of pairs; else empty.
  const auto add = [&](const std::vector<std::string>& paths,
                       const std::vector<std::string>& targets, SplitIndex split) {
    for (std::size_t i = 0; i < paths.size(); ++i) {
      inputs.push_back(targets.empty()
                           ? InputPath{.path = paths[i], .split = split}
                           : InputPath{.path = targets[i], .source = paths[i], .split = split});
    }
  };
  add(options.paths, options.target_paths, kTrain);
  add(options.valid_paths, options.valid_target_paths, kValid);
  add(options.test_paths, options.test_target_paths, kTest);
  return inputs;
}

void require_no_streams(const std::vector<InputPath>& inputs, const std::string& why) {
  for (const InputPath& input : inputs) {
    for (const std::string& path : {input.path, input.source}) {
      if (path == "-" || is_pipe(path)) fail(ExitCode::kUsage, "{}: {}", path, why);
    }
  }
}

bool agree_on_input(ProcessGroup& ranks, const std::string& input, bool is_finished,
                    const char* what) {
  const std::string first = ranks.broadcast_bytes(input + (is_finished ? "+" : "-"), 0, "input");
  const std::string_view its_input = std::string_view(first).substr(0, first.size() - 1);
  if (its_input != input) {
    fail(ExitCode::kData,
         "rank {} sees other {} than rank 0 ({}, not {}); give paths on a file system that all see",
         ranks.rank(), what, input, its_input);
  }
  return first.back() == '+';
}

std::string shares_text(const PrepareOptions& options) {
  const auto share = [](const std::vector<std::string>& paths, double fraction) {
    return paths.empty() ? fmt::format("{}", fraction) : std::string("given");
  };
  return fmt::format("valid {}, test {}", share(options.valid_paths, options.valid_fraction),
                     share(options.test_paths, options.test_fraction));
}

void require_documents(const InputScan& scan, const PrepareOptions& options, const char* what) {
  const auto require_some = [&](SplitIndex split, const std::vector<std::string>& paths) {
    if (paths.empty() || scan.documents_of[split] > 0) return;
    fail(ExitCode::kUsage,
         "no {} in the input of the {} split, from {} on ({}, {} that are not regular files); "
         "give other paths",
         what, kSplitNames[split], paths.front(), counted(scan.empty_files, "empty file"),
         scan.not_regular);
  };
  require_some(kTrain, options.paths);
  require_some(kValid, options.valid_paths);
  require_some(kTest, options.test_paths);
}

void fail_as_empty(SplitIndex split, const std::string& first_path, const std::string& of_what,
                   const PrepareOptions& options) {
  fail(ExitCode::kUsage,
       "{}: the {} split gets nothing of {} (--valid {} --test {}); give more or other fractions",
       first_path, kSplitNames[split], of_what, options.valid_fraction, options.test_fraction);
}

void require_same(const OutFolder& folder, const configs::CorpusManifest::Source& source,
                  const char* what, const std::string& why_no_hash,
                  const std::function<bool(const configs::CorpusManifest::Source&)>& same_content) {
  const Corpus corpus(folder.path());
  const auto& there = corpus.manifest().source();
  if (there.options() != source.options()) {
    fail(ExitCode::kUsage,
         "--out {}: holds a corpus made with other options ({}); name another folder or delete "
         "this one",
         folder.path(), there.options());
  }
  if (there.input_hash() == source.input_hash() || same_content(there)) return;
  fail(ExitCode::kUsage,
       "--out {}: holds a corpus made from other {}{}; name another folder or "
       "delete this one",
       folder.path(), what,
       there.has_text_hash() ? ""
                             : fmt::format(", or its files were touched since ({})", why_no_hash));
}

}  // namespace birkhoff
