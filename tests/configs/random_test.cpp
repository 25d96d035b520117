// Random configurations, texts, settings and includes. Each is accepted exactly, and builds a model
// if that is small, or is rejected within a second in one line that names a location. None crashes.
// BIRKHOFF_RANDOM_CONFIGS sets their number; the default is 2000.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cctype>
#include <cstdlib>

#include "configs/loader/check.h"
#include "helpers.h"
#include "random_config.h"
#include "runtime/tasks/task.h"
#include "tests/processor_time.h"

namespace birkhoff {
namespace {

// Input of one of the readers; `file` is empty for a text.
struct Input {
  std::string text, file;
  std::vector<std::string> settings;
};

// "FILE:LINE:COLUMN: ..." or "FILE: a.field: ..." or "--set ...: ...".
bool names_a_place(const std::string& what, const std::string& file) {
  if (what.starts_with("--set ")) return true;
  if (!what.starts_with(file + ":")) return false;
  const std::string rest = what.substr(file.size() + 1);
  return std::isdigit(static_cast<unsigned char>(rest[0])) != 0 ||
         (rest.size() > 2 && std::islower(static_cast<unsigned char>(rest[1])) != 0);
}

void expect_exact(const configs::Config& config) {
  const std::string text = config_text(config);
  const configs::Config again = parse_config(text, "text", {});
  EXPECT_EQ(config_text(again), text);  // resolving twice changes nothing
  EXPECT_TRUE(equal(again, config));
  EXPECT_TRUE(diff_configs(config, again).empty());
}

// True if its model takes milliseconds to build and, with `run`, to run.
bool is_small(const configs::Config& config, bool run) {
  const auto& model = config.model();
  const int length = config.data().sequence_length();
  if (model.layers() > 4 || model.channels() > 64 || model.feed_forward() > 300 || length > 256) {
    return false;
  }
  const configs::PointSets& sets = config.task().point_sets();
  if (std::max({sets.dimensions(), sets.set_transformer().inducing_points(),
                sets.set_transformer().seeds()}) > 300) {
    return false;
  }
  const auto small = [&](const configs::SinkhornAttention& sinkhorn) {
    if (sinkhorn.max_blocks() > 256) return false;
    return !run || (length / sinkhorn.block() <= 32 && sinkhorn.iterations() <= 32);
  };
  for (const auto& attention : model.attention()) {
    for (const auto& group : attention.group()) {
      const auto& mechanism = group.mechanism();
      if (mechanism.has_sinkhorn() && !small(mechanism.sinkhorn())) return false;
      if (mechanism.has_sinkhorn_mixture() && !small(mechanism.sinkhorn_mixture().sinkhorn()))
        return false;
    }
  }
  return true;
}

class RandomConfigs : public testing::Test {
 protected:
  RandomConfigs() {
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(BIRKHOFF_SOURCE_DIR) + "/configs")) {
      if (entry.path().extension() == ".txtpb") files_.push_back(entry.path());
    }
    std::sort(files_.begin(), files_.end());
  }

  Input draw(RandomConfig& random) {
    Input input;
    configs::Config config;
    switch (random.below(6)) {
      case 0:  // mostly accepted
      case 1:
        random.fill(config, false);
        make_consistent(config);
        input.text = config_text(config);
        break;
      case 2:
        random.fill(config, true);
        if (!random.one_in(3)) make_consistent(config);
        input.text = config_text(config);
        break;
      case 3: {
        const configs::Config good =
            load_config(files_[random.below(files_.size())], {"data.corpus=corpus"});
        input.text = random.damaged(config_text(good));
        break;
      }
      case 4:
        input.text = kTask + std::string("model { attention { group {} } }");
        for (std::uint64_t n = 1 + random.below(4); n > 0; --n) {
          input.settings.push_back(random.setting());
        }
        break;
      default:
        input.file = draw_includes(random, input.text);
    }
    return input;
  }

  // Writes files that include each other, some damaged. Returns the path of the first one; `text`
  // receives all of them.
  std::string draw_includes(RandomConfig& random, std::string& text) {
    static const std::vector<std::string> kNames = {"a.txtpb", "b.txtpb",    "sub/c.txtpb",
                                                    "d.txtpb", "../b.txtpb", "missing.txtpb",
                                                    "",        "sub",        "/etc/passwd"};
    for (std::size_t i = 0; i < 4; ++i) {
      std::string content;
      if (random.one_in(4)) {
        content = read_text(files_[random.below(files_.size())]);
      } else {
        for (std::uint64_t n = random.below(3); n > 0; --n) {
          // Mostly later names, so that not all includes form a cycle.
          const std::size_t name =
              random.one_in(4) ? random.below(kNames.size()) : std::min<std::size_t>(i + n, 3);
          content += fmt::format("include: \"{}\"\n", kNames[name]);
        }
        configs::Config config;
        random.fill(config, false);
        if (i == 0) make_consistent(config);
        content += config_text(config);
      }
      if (random.one_in(4)) content = random.damaged(content);
      text += fmt::format("-- {}\n{}\n", kNames[i], content);
      folder_.write(kNames[i], content);
    }
    return folder_.path() / "a.txtpb";
  }

  static std::string read_text(const std::filesystem::path& file) {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  void expect_refusal(const Error& error, const Input& input) const {
    const std::string what = error.what();
    EXPECT_EQ(error.code(), ExitCode::kConfig) << what;
    EXPECT_LT(what.size(), 700u);
    for (const char c : what) {
      EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) << what;
    }
    EXPECT_TRUE(input.file.empty() ? names_a_place(what, "text")
                                   : what.starts_with(folder_.path().string()))
        << what;
  }

  // Builds the model and, with `run`, runs it over one sequence.
  void expect_model(const configs::Config& config, bool run) {
    constexpr std::int64_t kVocabulary = 11;
    std::unique_ptr<Model> model;
    std::optional<ImageDims> image;
    try {
      const std::unique_ptr<Task> task = make_task(config);
      ModelInputs inputs = task->inputs(kVocabulary);
      image = inputs.image;
      // So that models are small: other numbers of classes are refused.
      constexpr std::size_t kMaxClasses = 1000;
      if (inputs.class_names.size() > kMaxClasses) inputs.class_names.resize(kMaxClasses);
      model = task->make_model(inputs, at::kCPU);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig) << error.what();
      EXPECT_THAT(error.what(), testing::ContainsRegex("(task|model|data)[.:]"));
      return;
    }
    ++num_models_;
    EXPECT_GT(model->parameters().num_elements(), 0);
    EXPECT_GT(model->forward_flops_per_sequence(), 0);
    if (!run) return;
    const std::int64_t length = config.data().sequence_length();
    Batch batch;
    batch.fields["inputs"] = at::arange(length, at::kLong).remainder(kVocabulary).unsqueeze(0);
    batch.fields["targets"] = at::zeros({1, length}, at::kLong);
    batch.fields["mask"] = at::ones({1, length}, at::kByte);
    if (config.data().restart_at_documents()) {
      batch.fields["segments"] = at::zeros({1, length}, at::kInt);
      batch.fields["positions"] = at::arange(length, at::kLong).unsqueeze(0);
    }
    if (image) {
      batch.fields["images"] =
          at::zeros({1, image->rows, image->columns, image->channels}, at::kByte);
    }
    batch.fields["points"] = at::ones({1, length, config.task().point_sets().dimensions()});
    const bool classifies = model->classifier() != nullptr;
    if (classifies) batch.fields["lengths"] = at::full({1}, length, at::kLong);
    if (classifies) batch.fields["labels"] = at::ones({1}, at::kLong);
    batch.sample_ids_B = at::zeros({1}, at::kLong);
    if (config.task().has_translation()) {
      batch = make_task(config)->synthetic_batch(kVocabulary, at::kCPU).narrow(0, 1);
    }
    EXPECT_EQ(model->loss_sums(batch, std::nullopt).count.item<double>(),
              classifies ? 1.0 : static_cast<double>(target_length(config)));
    ++num_runs_;
    num_image_runs_ += image.has_value();
    num_point_runs_ += config.task().has_point_sets();
  }

  void run(RandomConfig& random) {
    const Input input = draw(random);
    double seconds = check(input, random);
    // A virtual CPU that stood still counts as busy.
    if (seconds >= kMaxSeconds) seconds = check(input, random);
    EXPECT_LT(seconds, kMaxSeconds);
    if (HasFailure()) {
      ADD_FAILURE() << fmt::format("the input was:\n{:.5000}\nsettings:\n{}", input.text,
                                   testing::PrintToString(input.settings));
    }
  }

  // Returns the seconds of CPU time that it took.
  double check(const Input& input, RandomConfig& random) {
    const double start = processor_seconds();
    try {
      const configs::Config config = input.file.empty()
                                         ? parse_config(input.text, "text", input.settings)
                                         : load_config(input.file, input.settings);
      ++num_accepted_;
      expect_exact(config);
      // Few configurations of other tasks are accepted, so all that are small run.
      const bool run = !config.task().has_language_model() || random.one_in(8);
      if (is_small(config, false)) expect_model(config, run && is_small(config, true));
    } catch (const Error& error) {
      ++num_refused_;
      expect_refusal(error, input);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "an exception that is no Error: " << error.what();
    }
    return processor_seconds() - start;
  }

  TemporaryFolder folder_;
  std::vector<std::filesystem::path> files_;
  int num_accepted_ = 0, num_refused_ = 0, num_models_ = 0, num_runs_ = 0;
  int num_image_runs_ = 0, num_point_runs_ = 0;  // of num_runs_
};

TEST_F(RandomConfigs, AreExactOrRefusedInOneLine) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const char* told = std::getenv("BIRKHOFF_RANDOM_CONFIGS");
  const int count = told == nullptr ? 2000 : std::atoi(told);
  std::mt19937_64 seeds(7);
  int tried = 0;
  for (; tried < count && !HasFailure(); ++tried) {
    RandomConfig random(seeds());
    run(random);
  }
  at::set_num_threads(threads);
  std::printf(
      "random configs: tried %d, survived %d, lost %d (%d accepted, %d refused, %d models, %d of "
      "them run, %d of images and %d of point sets)\n",
      tried, tried - HasFailure(), static_cast<int>(HasFailure()), num_accepted_, num_refused_,
      num_models_, num_runs_, num_image_runs_, num_point_runs_);
  EXPECT_GT(num_accepted_, count / 20);
  EXPECT_GT(num_refused_, count / 20);
  EXPECT_GT(num_models_, count / 50);
  EXPECT_GT(num_runs_, count / 1000);
  EXPECT_GT(num_image_runs_, count / 1000);
  EXPECT_GT(num_point_runs_, count / 1000);
}

}  // namespace
}  // namespace birkhoff
