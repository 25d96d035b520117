#include "launcher/decoding/encoded_lines.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "launcher/commands/text_input.h"
#include "launcher/runs/run_paths.h"

namespace birkhoff {

std::vector<std::int32_t> ids_of(const std::string& text, const std::string& place,
                                 const Tokenizer& tokenizer, bool reads_bytes) {
  if (!reads_bytes) check_utf8(text, place);
  try {
    return tokenizer.encode(text);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}", place, error.what());
  }
}

SourceReader::SourceReader(const CheckpointFolder& checkpoint, std::int64_t max_tokens)
    : tokenizer_(source_tokenizer_of(checkpoint)), max_tokens_(max_tokens) {
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  const bool has_own = manifest.has_source_tokenizer();
  reads_bytes_ = (has_own ? manifest.source_tokenizer().kind() : manifest.tokenizer()) == "bytes";
  if (has_own ? manifest.source_tokenizer().has_end_of_document()
              : manifest.has_end_of_document()) {
    end_mark_ = static_cast<std::int32_t>(has_own ? manifest.source_tokenizer().end_of_document()
                                                  : manifest.end_of_document());
  }
}

SourceReader::Source SourceReader::read(const std::string& text, const std::string& place) const {
  Source source{ids_of(text, place, *tokenizer_, reads_bytes_)};
  if (end_mark_) source.ids.push_back(*end_mark_);
  if (source.ids.empty()) fail(ExitCode::kData, "{}: the source is empty; remove it", place);
  source.num_cut = std::max<std::int64_t>(0, std::ssize(source.ids) - max_tokens_);
  source.ids.resize(source.ids.size() - static_cast<std::size_t>(source.num_cut));
  return source;
}

}  // namespace birkhoff
