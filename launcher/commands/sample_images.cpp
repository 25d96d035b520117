#include "launcher/commands/sample_images.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/corpus.h"
#include "launcher/commands/image_grid.h"
#include "launcher/commands/model_tokenizer.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/runs/run_paths.h"
#include "models/embeddings/token_embedding.h"
#include "runtime/decoding/generator.h"
#include "runtime/run_checks.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

using Values = std::vector<std::uint8_t>;  // of an image

// The values of images are decoded one at a time, and a grid is one picture.
constexpr std::int64_t kMaxImages = 4096;

void refuse_text_options(const SampleArguments& arguments) {
  if (arguments.png.empty() || arguments.tokens) {
    fail(ExitCode::kUsage,
         "{}: the model generates whole images, and continues no text; leave {} out, and give "
         "--png FILE",
         arguments.path, arguments.png.empty() ? "the prompt" : "--tokens");
  }
  // Before images are drawn, which may take long.
  if (const std::string folder = parent_path(arguments.png); !is_directory(folder)) {
    fail(ExitCode::kUsage, "--png {}: no folder {}", arguments.png, folder);
  }
}

// The first images of the split.
std::vector<Values> images_of(const SampleArguments& arguments, const CheckpointFolder& checkpoint,
                              const Task& task, const ImageDims& shape, ProcessGroup& world) {
  const Corpus corpus(arguments.corpus.empty() ? checkpoint.manifest.config().data().corpus()
                                               : arguments.corpus);
  require_same_inputs(task, checkpoint, arguments.path, corpus, arguments.split);
  check_same_corpus(world, corpus);
  const auto source = task.evaluation_source(corpus, arguments.split);
  if (source->num_samples() < arguments.samples) {
    fail(ExitCode::kUsage, "--samples {}: split '{}' of {} has {}; lower it", arguments.samples,
         arguments.split, corpus.folder().string(), counted(source->num_samples(), "image"));
  }
  const Batch batch = read_samples(*source, 0, arguments.samples);
  const auto* values = batch.at(field::kImages).const_data_ptr<std::uint8_t>();
  std::vector<Values> images;
  for (std::int64_t i = 0; i < arguments.samples; ++i) {
    images.emplace_back(values, values + shape.values());
    values += shape.values();
  }
  return images;
}

}  // namespace

void sample_images(const SampleArguments& arguments, const CheckpointFolder& checkpoint,
                   const ImageDims& shape, const ModelRank& rank, std::ostream& out,
                   std::ostream& err) {
  const bool speaks = rank.world.rank() == 0;
  const std::unique_ptr<Task> task = make_task(config_of(checkpoint));
  const std::unique_ptr<Model> model = load_model(checkpoint, *task, rank.place);
  if (model->decoder() == nullptr) {
    fail(ExitCode::kUsage, "{}: a model of this task generates no images", arguments.path);
  }
  refuse_text_options(arguments);
  if (arguments.samples > kMaxImages) {
    fail(ExitCode::kUsage, "--samples {}: a grid has at most {} images", arguments.samples,
         kMaxImages);
  }
  if (!png_has_channels(shape.channels)) {
    fail(ExitCode::kUsage, "{}: a PNG shows images of 1 or 3 channels, and the model's have {}",
         arguments.path, shape.channels);
  }
  GenerateOptions options{.sampling = {.temperature = arguments.temperature,
                                       .top_k = arguments.top_k,
                                       .top_p = arguments.top_p,
                                       .seed = static_cast<std::uint64_t>(arguments.seed)}};
  check_options(options);
  for (const std::string& warning : model->warnings()) {
    if (speaks) err << "birkhoff: warning: " << warning << '\n';
  }
  std::vector<Values> originals;
  if (arguments.complete) originals = images_of(arguments, checkpoint, *task, shape, rank.world);
  const auto num_given = static_cast<std::int64_t>(
      std::floor(arguments.complete.value_or(0) * static_cast<double>(shape.values())));
  options.tokens = shape.values() - num_given;

  std::vector<Values> grid;
  {
    std::optional<ProgressLines> lines;
    if (speaks) lines.emplace(err);
    for (std::int64_t n = 0; n < arguments.samples; ++n) {
      if (lines) lines->show(fmt::format("sample: image {} of {}", n + 1, arguments.samples));
      Values image;
      if (arguments.complete) {
        const Values& original = originals[static_cast<std::size_t>(n)];
        image.assign(original.begin(), original.begin() + num_given);
        grid.push_back(image);
        grid.back().resize(original.size());
      }
      std::vector<std::int32_t> prompt{kBeginToken};
      prompt.insert(prompt.end(), image.begin(), image.end());
      options.text = static_cast<std::uint64_t>(n);
      const auto take = [&](std::int32_t) { rank.tick(); };
      for (const std::int32_t value : generate(*model->decoder(), prompt, options, take)) {
        image.push_back(static_cast<std::uint8_t>(value));
      }
      grid.push_back(image);
      if (arguments.complete) grid.push_back(originals[static_cast<std::size_t>(n)]);
    }
  }
  if (!speaks) return;
  const auto columns =
      arguments.complete
          ? std::int64_t{3}
          : static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(arguments.samples))));
  write_image_grid(arguments.png, grid, shape, columns);
  out << fmt::format("{}: {} of {}\n", arguments.png,
                     counted(arguments.samples, arguments.complete ? "completion" : "image"),
                     shape.text());
}

}  // namespace birkhoff
