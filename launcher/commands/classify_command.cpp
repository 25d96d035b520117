#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "launcher/commands.h"
#include "launcher/commands/run_paths.h"
#include "launcher/output.h"
#include "launcher/processes/ranks.h"
#include "models/classifier.h"

namespace birkhoff {
namespace {

constexpr std::size_t kBatch = 32;              // texts per forward pass
constexpr std::size_t kMaxLineBytes = 1 << 20;  // of a text

// The lines of a file, pipe or standard input, without their ends. One line is in memory at a time.
class TextLines {
 public:
  explicit TextLines(const std::string& path)
      : file_(path == "-" ? File::standard_input()
                          : File::open_stream_for_read(path, ExitCode::kUsage)),
        waits_(path != "-") {}

  // nullopt after the last line.
  std::optional<std::string> next() {
    std::size_t end = buffer_.find('\n');
    while (end == std::string::npos && buffer_.size() <= kMaxLineBytes && read_more()) {
      end = buffer_.find('\n');
    }
    if (buffer_.empty()) return std::nullopt;
    ++number_;
    std::string line = buffer_.substr(0, end);
    if (line.size() > kMaxLineBytes) {
      fail(ExitCode::kData, "{}: the line is longer than {} bytes; give one text per line", place(),
           kMaxLineBytes);
    }
    buffer_.erase(0, end == std::string::npos ? end : end + 1);
    if (line.ends_with('\r')) line.pop_back();
    return line;
  }

  // Of the line that next() has returned: "FILE:LINE".
  std::string place() const { return fmt::format("{}:{}", file_.path(), number_); }

 private:
  bool read_more() {
    if (waits_) file_.wait_for_input();
    const std::size_t had = buffer_.size();
    buffer_.resize(had + kMaxLineBytes);
    buffer_.resize(had + file_.read_some(buffer_.data() + had, kMaxLineBytes));
    return buffer_.size() > had;
  }

  File file_;
  const bool waits_;
  std::string buffer_;
  std::int64_t number_ = 0;
};

// Texts and their ids.
struct Texts {
  std::vector<std::string> texts;
  std::vector<std::vector<std::int32_t>> ids;  // at least one each
};

// As prepare makes documents: the ids of the text, then the end mark if there is one.
std::vector<std::int32_t> ids_of(const std::string& text, const std::string& place,
                                 const Tokenizer& tokenizer,
                                 const configs::CheckpointManifest& manifest) {
  if (text.empty()) fail(ExitCode::kData, "{}: the line is empty; remove it", place);
  std::vector<std::int32_t> ids;
  try {
    ids = tokenizer.encode(text);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}", place, error.what());
  }
  if (manifest.has_end_of_document())
    ids.push_back(static_cast<std::int32_t>(manifest.end_of_document()));
  return ids;
}

Batch batch_of(const Texts& texts, std::int64_t max_tokens) {
  std::int64_t longest = 1;
  for (const auto& ids : texts.ids)
    longest = std::max(longest, std::min(max_tokens, static_cast<std::int64_t>(ids.size())));
  const auto rows = static_cast<std::int64_t>(texts.ids.size());
  const at::Tensor inputs_BT = at::zeros({rows, longest}, at::kLong);
  const at::Tensor lengths_B = at::zeros({rows}, at::kLong);
  auto* tokens = inputs_BT.mutable_data_ptr<std::int64_t>();
  auto* lengths = lengths_B.mutable_data_ptr<std::int64_t>();
  for (const auto& ids : texts.ids) {
    *lengths = std::min(max_tokens, static_cast<std::int64_t>(ids.size()));
    std::copy_n(ids.begin(), *lengths++, tokens);
    tokens += longest;
  }
  Batch batch;
  batch.fields.emplace(field::kInputs, inputs_BT);
  batch.fields.emplace(field::kLengths, lengths_B);
  batch.sample_ids_B = at::zeros({rows}, at::kLong);
  return batch;
}

std::string json_line(const std::string& text, const std::string& name, double probability,
                      const double* probabilities,
                      const google::protobuf::RepeatedPtrField<std::string>& names) {
  nlohmann::ordered_json object = {{"text", text}, {"class", name}, {"probability", probability}};
  for (int k = 0; k < names.size(); ++k) object["probabilities"][names[k]] = probabilities[k];
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
}

}  // namespace

int classify_command(const ClassifyArguments& arguments, std::ostream& out, std::ostream& err) {
  signal(SIGPIPE, SIG_DFL);  // when the reader of a pipe has left, end without a message
  compute_on_cpu(threads_of_rank(/*local_ranks=*/1));
  const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of(checkpoint);
  const LoadedModel loaded = load_model(checkpoint, device_named(arguments.device));
  Classifier* model = loaded.model->classifier();
  if (model == nullptr) {
    fail(ExitCode::kUsage,
         "{}: a model of this task has no classes; train one with task {{ classification {{}} }}",
         arguments.path);
  }
  for (const std::string& warning : loaded.model->warnings())
    err << "birkhoff: warning: " << warning << '\n';

  std::int64_t num_cut = 0;
  const auto classify = [&](const Texts& texts) {
    const at::Tensor p_BK =
        model->log_probabilities(batch_of(texts, model->max_tokens()).to(model->device()))
            .to(at::kCPU, at::kDouble)
            .exp()
            .contiguous();
    const std::int64_t classes = p_BK.size(1);
    const double* p = p_BK.const_data_ptr<double>();
    for (std::size_t i = 0; i < texts.texts.size(); ++i, p += classes) {
      const auto best = static_cast<int>(std::max_element(p, p + classes) - p);
      const std::string& name = manifest.class_name(best);
      out << (arguments.json ? json_line(texts.texts[i], name, p[best], p, manifest.class_name())
                             : fmt::format("{}\t{:.4f}\n", name, p[best]));
      num_cut += static_cast<std::int64_t>(texts.ids[i].size()) > model->max_tokens();
    }
    flush_output(out);
  };
  TextLines lines(arguments.file);
  Texts texts;
  while (const std::optional<std::string> line = lines.next()) {
    texts.ids.push_back(ids_of(*line, lines.place(), *tokenizer, manifest));
    texts.texts.push_back(*line);
    if (texts.texts.size() < kBatch) continue;
    classify(texts);
    texts = {};
  }
  if (!texts.texts.empty()) classify(texts);
  if (num_cut > 0) {
    err << "birkhoff: warning: " << counted(num_cut, "text was", "texts were")
        << " cut to the model's data.sequence_length = " << model->max_tokens() << " tokens\n";
  }
  return 0;
}

}  // namespace birkhoff
