#include "data/generate/made_corpus.h"

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "data/corpus/corpus.h"
#include "data/corpus/manifest.h"

namespace birkhoff {

bool make_corpus(
    const std::string& out, const std::string& options,
    const std::function<void(const OutFolder&, configs::CorpusManifest& manifest)>& fill) {
  OutFolder folder(out);
  folder.begin();
  folder.clear();
  const bool finished = folder.finished();
  if (finished) {
    const Corpus corpus(folder.path());
    const std::string& made_with = corpus.manifest().source().options();
    if (made_with != options) {
      fail(ExitCode::kUsage,
           "--out {}: holds another corpus ({}); name another folder or delete this one",
           folder.path(), made_with);
    }
  } else {
    configs::CorpusManifest manifest = new_manifest();
    manifest.mutable_source()->set_options(options);
    fill(folder, manifest);
    write_file_durably(folder.file(kCorpusManifestName), manifest_json(manifest));
  }
  folder.end();
  return !finished;
}

}  // namespace birkhoff
