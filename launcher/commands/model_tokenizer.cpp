#include "launcher/commands/model_tokenizer.h"

#include "cluster/base/error.h"
#include "data/corpus/verify.h"
#include "launcher/runs/run_paths.h"

namespace birkhoff {
namespace {

std::string hash_of(const configs::CheckpointManifest& checkpoint, const std::string& name) {
  for (const auto& file : checkpoint.file()) {
    if (!name.empty() && file.name() == name) return file.hash();
  }
  return "";
}

// The tokenizer of the model's targets, or of its sources.
configs::CorpusManifest::Tokenizer tokenizer_entry(const configs::CheckpointManifest& model,
                                                   bool of_sources) {
  if (of_sources && model.has_source_tokenizer()) {
    configs::CorpusManifest::Tokenizer entry = model.source_tokenizer();
    entry.set_hash(hash_of(model, entry.file()));
    return entry;
  }
  configs::CorpusManifest::Tokenizer entry;
  entry.set_kind(model.tokenizer());
  entry.set_vocabulary(model.vocabulary());
  entry.set_hash(hash_of(model, model.tokenizer_file()));
  return entry;
}

// Instructions to make a corpus that fits the model.
std::string cure_of(const configs::CheckpointManifest& model, const std::string& path) {
  if (model.class_name_size() > 0) {
    return fmt::format(
        "prepare its table like the model's: birkhoff prepare --out NEW --like {} --text-column "
        "COLUMN --label-column COLUMN TABLE",
        path);
  }
  return fmt::format(
      "prepare its text like the model's: birkhoff prepare --out NEW --like {} TEXT; or evaluate "
      "the text: birkhoff eval {} --text TEXT",
      path, path);
}

// folder: of the tokenizer's file.
TokenizerSource source_of(const configs::CorpusManifest::Tokenizer& entry,
                          const std::filesystem::path& folder) {
  TokenizerSource source{.kind = entry.kind(), .vocabulary = entry.vocabulary()};
  if (!entry.file().empty()) source.file = (folder / entry.file()).string();
  if (entry.has_end_of_document()) source.end_of_document = entry.end_of_document();
  return source;
}

}  // namespace

TokenizerSource tokenizer_source(const CheckpointFolder& checkpoint) {
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  if (manifest.tokenizer().empty()) {
    fail(ExitCode::kUsage,
         "{}: has no tokenizer, because its model reads no text; name a model of text",
         checkpoint.path.string());
  }
  TokenizerSource source{.kind = manifest.tokenizer(), .vocabulary = manifest.vocabulary()};
  if (!manifest.tokenizer_file().empty())
    source.file = (checkpoint.path / manifest.tokenizer_file()).string();
  if (manifest.has_end_of_document()) source.end_of_document = manifest.end_of_document();
  return source;
}

TokenizerSource tokenizer_source(const std::string& run_or_corpus) {
  if (kind_of(run_or_corpus) != PathKind::kCorpus)
    return tokenizer_source(checkpoint_of(run_or_corpus));
  const Corpus corpus(run_or_corpus);
  if (!corpus.has_tokenizer()) {
    fail(ExitCode::kUsage,
         "{}: has no tokenizer, because it holds records and no text; name a corpus of text",
         run_or_corpus);
  }
  return source_of(corpus.manifest().tokenizer(), corpus.folder());
}

std::optional<TokenizerSource> source_tokenizer_source(const std::string& run_or_corpus) {
  if (kind_of(run_or_corpus) != PathKind::kCorpus) {
    const CheckpointFolder checkpoint = checkpoint_of(run_or_corpus);
    if (!checkpoint.manifest.has_source_tokenizer()) return std::nullopt;
    return source_of(checkpoint.manifest.source_tokenizer(), checkpoint.path);
  }
  const Corpus corpus(run_or_corpus);
  for (const auto& stream : corpus.manifest().split(0).stream()) {
    if (stream.has_tokenizer()) return source_of(stream.tokenizer(), corpus.folder());
  }
  return std::nullopt;
}

std::vector<std::string> class_names(const std::string& run_or_corpus) {
  if (kind_of(run_or_corpus) != PathKind::kCorpus) {
    const CheckpointFolder checkpoint = checkpoint_of(run_or_corpus);
    const auto& names = checkpoint.manifest.class_name();
    return {names.begin(), names.end()};
  }
  const Corpus corpus(run_or_corpus);
  for (const auto& record : corpus.manifest().split(0).record()) {
    if (record.class_name_size() > 0)
      return {record.class_name().begin(), record.class_name().end()};
  }
  return {};
}

namespace {

// where: the corpus, or a stream of it.
void require_same(const configs::CorpusManifest::Tokenizer& tokenizer,
                  const configs::CorpusManifest::Tokenizer& of_model, const std::string& where,
                  const std::string& cure) {
  const std::int64_t ids = of_model.vocabulary();
  const bool is_same_file =
      tokenizer.kind() == of_model.kind() && tokenizer.hash() == of_model.hash();
  const bool lacks_the_mark = !tokenizer.has_end_of_document() && tokenizer.vocabulary() + 1 == ids;
  if (is_same_file && (tokenizer.vocabulary() == ids || lacks_the_mark)) return;
  if (is_same_file && tokenizer.vocabulary() == ids + 1) {
    fail(ExitCode::kData,
         "{}: its documents end in id {}, but the model has only {} ids, from a single document; "
         "{}",
         where, ids, ids, cure);
  }
  const auto shown = [](const std::string& kind) { return kind.empty() ? "none" : kind; };
  fail(ExitCode::kData, "{}: its tokenizer ({}, {} ids{}) is not the model's ({}, {} ids); {}",
       where, shown(tokenizer.kind()), tokenizer.vocabulary(),
       is_same_file || tokenizer.kind() != of_model.kind() ? "" : ", learned from other text",
       shown(of_model.kind()), ids, cure);
}

}  // namespace

void require_same_tokenizer(const Task& task, const CheckpointFolder& checkpoint,
                            const std::string& path, const Corpus& corpus) {
  const configs::CheckpointManifest& model = checkpoint.manifest;
  const std::string folder = corpus.folder().string();
  if (task.source_stream().empty()) {
    return require_same(corpus.manifest().tokenizer(), tokenizer_entry(model, false), folder,
                        cure_of(model, path));
  }
  for (const bool of_sources : {true, false}) {
    const std::string stream = of_sources ? task.source_stream() : task.target_stream();
    require_same(
        corpus.tokenizer_entry(stream), tokenizer_entry(model, of_sources),
        fmt::format("{}, stream '{}'", folder, stream),
        fmt::format("prepare its pairs like the model's: birkhoff prepare --out NEW --like "
                    "{} --train SOURCES --target TARGETS",
                    path));
  }
}

void require_same_inputs(const Task& task, const CheckpointFolder& checkpoint,
                         const std::string& path, const Corpus& corpus, const std::string& split) {
  const ModelInputs inputs = task.inputs(corpus, split),
                    of_model = model_inputs(checkpoint.manifest);
  if (inputs.image && inputs.image != of_model.image) {
    fail(ExitCode::kData,
         "{}: its images are {}, but the model's {} (rows, columns, channels); prepare images of "
         "that size",
         corpus.folder().string(), inputs.image->text(),
         of_model.image.value_or(ImageDims()).text());
  }
  if (inputs.class_names == of_model.class_names) return;
  const std::string cure = task.reads_text() ? cure_of(checkpoint.manifest, path)
                                             : "prepare a corpus of the same classes";
  const google::protobuf::RepeatedPtrField<std::string> names(inputs.class_names.begin(),
                                                              inputs.class_names.end());
  fail(ExitCode::kData, "{}: the classes of its labels, {}, are not the model's, {}; {}",
       corpus.folder().string(), classes_text(names),
       classes_text(checkpoint.manifest.class_name()), cure);
}

}  // namespace birkhoff
