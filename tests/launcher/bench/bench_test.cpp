// The parts of the `bench` subcommands: bandwidth factors, right and wrong results, medians and
// tables. Also runs each subcommand of the real program on a small case.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cluster/base/instruction_set.h"
#include "launcher/bench/attention_comparison.h"
#include "launcher/bench/collectives.h"
#include "launcher/measure/report.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

// github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Summary".
TEST(BusFactor, IsThatOfNcclTests) {
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kAllReduce, 2), 1);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kAllReduce, 8), 1.75);
  for (const Collective what :
       {Collective::kReduceScatter, Collective::kAllGather, Collective::kAllToAll}) {
    EXPECT_DOUBLE_EQ(bus_factor(what, 2), 0.5) << collective_name(what);
    EXPECT_DOUBLE_EQ(bus_factor(what, 8), 0.875) << collective_name(what);
  }
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kBroadcast, 2), 1);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kBroadcast, 8), 1);
}

TEST(Collectives, AGroupGivesWhatIsExpected) {
  constexpr int kRanks = 3;
  run_ranks(kRanks, [](ProcessGroup& group) {
    const RunCollective run = group_collectives(group);
    for (const Collective what : kCollectives) {
      const CollectiveTensors tensors = make_tensors(what, 999, group.rank(), kRanks);
      run(what, tensors.output, tensors.input);
      EXPECT_EQ(
          first_difference(tensors.output, expected_output(what, 999, {group.rank(), kRanks, 1})),
          "")
          << collective_name(what) << " on rank " << group.rank();
    }
  });
}

TEST(Collectives, ASumInAnotherOrderIsSeen) {
  const auto values = [](int rank) {
    return make_tensors(Collective::kAllReduce, 999, rank, 3).output;
  };
  const at::Tensor expected = expected_output(Collective::kAllReduce, 999, {0, 3, 1});
  EXPECT_EQ(first_difference(values(0) + values(1) + values(2), expected), "");
  EXPECT_NE(first_difference(values(2) + values(1) + values(0), expected), "");
  const at::Tensor in_nodes = expected_output(Collective::kAllReduce, 999, {0, 4, 2});
  EXPECT_EQ(first_difference((values(0) + values(1)) + (values(2) + values(3)), in_nodes), "");
  EXPECT_NE(first_difference(values(0) + values(1) + values(2) + values(3), in_nodes), "");
}

TEST(Collectives, OneBitIsSeenAndNamed) {
  const at::Tensor expected = at::zeros({10});
  const at::Tensor output = at::zeros({10});
  output.mutable_data_ptr<float>()[7] = -0.0f;
  EXPECT_THAT(first_difference(output, expected), HasSubstr("element 7 is -0"));
  const at::Tensor no_number = at::full({10}, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(first_difference(no_number, no_number.clone()), "") << "bits, not values";
}

TEST(Report, MedianAndTable) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({5}), 5);
  EXPECT_EQ(figure(0.00012345), "0.0001234");
  EXPECT_EQ(figure(12345.6), "12346");
  EXPECT_EQ(table_head({"a", "b"}), "| a | b |\n|---|---:|\n");
  EXPECT_EQ(table_row({"a", "1"}), "| a | 1 |\n");
  EXPECT_THAT(report_title({"bench", "step", "x y"}),
              testing::EndsWith("`birkhoff bench step 'x y'`\n"));
  EXPECT_THAT(report_title({"bench"}, at::kCPU, 2), HasSubstr("; 2 ranks of `birkhoff bench`"));
}

// The cells of all table rows in a report, without heads.
std::vector<std::vector<std::string>> rows_of(const std::string& report) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream lines(report);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("| ", 0) != 0) {
      if (line.rfind("|--", 0) == 0) rows.pop_back();  // the row above is a head
      continue;
    }
    rows.emplace_back();
    std::istringstream cells(line.substr(2));
    for (std::string cell; std::getline(cells, cell, '|');) {
      cell.erase(cell.find_last_not_of(' ') + 1);
      rows.back().push_back(cell.substr(std::min(cell.find_first_not_of(' '), cell.size())));
    }
  }
  return rows;
}

// Every cell except the first is a number above 0.
void expect_figures(const std::vector<std::string>& row) {
  for (std::size_t i = 1; i < row.size(); ++i) {
    char* end = nullptr;
    EXPECT_GT(std::strtod(row[i].c_str(), &end), 0) << row[0] << ": '" << row[i] << "'";
    EXPECT_EQ(*end, '\0') << row[0] << ": '" << row[i] << "'";
  }
}

// The same for a report of the loader. So few rows take less CPU time than its clock can tell.
void expect_speeds(const std::vector<std::vector<std::string>>& rows) {
  for (std::vector<std::string> row : rows) {
    if (row.size() == 4) row.pop_back();
    expect_figures(row);
  }
}

// The number after `words` in a text.
double number_after(const std::string& text, const std::string& words) {
  const std::size_t at = text.find(words);
  EXPECT_NE(at, std::string::npos) << words << " in " << text;
  return at == std::string::npos ? 0 : std::strtod(text.c_str() + at + words.size(), nullptr);
}

class BenchProcess : public testing::Test {
 protected:
  BenchProcess() {
    write_bytes(path("good.txtpb"), kGoodConfig);
    write_bytes(path("text"), some_text(100'000, 1));
  }

  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }

  // Returns the report; its first line must name program and command.
  std::string bench(const std::string& line, const std::string& title_end = "") const {
    const Finished finished =
        run_child({.line = birkhoff_line(split_line(line)),
                   .folder = folder_.path(),
                   .environment = {{"OMP_NUM_THREADS", "1"}, {"TMPDIR", path("")}}});
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_EQ(finished.err, "");
    EXPECT_THAT(finished.out, StartsWith("birkhoff "));
    EXPECT_THAT(finished.out.substr(0, finished.out.find('\n')),
                HasSubstr(title_end.empty() ? "; `birkhoff " + line + "`" : title_end));
    return finished.out;
  }

 private:
  TemporaryFolder folder_{"birkhoff_bench_test"};
};

TEST_F(BenchProcess, Step) {
  std::vector<double> gradient_errors;
  for (const char* const precision : {"fp32", "bf16"}) {
    const std::string report =
        bench(std::string("bench step good.txtpb --steps 2 --set train.precision=") + precision +
              " --set train.micro_batch=3 --profile");
    // A model that is compared with itself has no error.
    EXPECT_GT(number_after(report, "relative error "), 0) << report;
    gradient_errors.push_back(number_after(report, "at most "));
    EXPECT_GT(gradient_errors.back(), 0) << report;
    const auto rows = rows_of(report);
    ASSERT_GT(rows.size(), 4u) << report;
    for (const std::size_t i : {0, 1, 3}) {
      ASSERT_EQ(rows[i].size(), 7u) << report;
      EXPECT_EQ(rows[i].back(), "") << "no data sheet is known of a CPU";
      expect_figures({rows[i].begin(), rows[i].end() - 1});
    }
    EXPECT_EQ(rows[0][0], "forward");
    EXPECT_EQ(rows[1][0], "backward");
    EXPECT_EQ(rows[2][0], "optimizer");
    EXPECT_EQ(rows[3][0], "step");
    bool has_product = false;
    for (const auto& row : rows) has_product |= row[0] == "aten::mm" || row[0] == "aten::addmm";
    EXPECT_TRUE(has_product) << "no matrix product in the profile: " << report;
  }
  EXPECT_LT(10 * gradient_errors[0], gradient_errors[1]) << "bf16 is coarser than fp32";
  // The model's own attention does not choose.
  EXPECT_THAT(bench("bench step good.txtpb --steps 1 --set train.precision=fp32"),
              testing::Not(HasSubstr("no bound")));
  EXPECT_THAT(bench("bench step good.txtpb --steps 1 --set train.precision=fp32 --set "
                    "'model.attention=[{group{mechanism{dense{normalizer:top_k kept_keys:2}}}}]'"),
              HasSubstr("(no bound, because rounded scores may choose other keys or points)"));
  EXPECT_THAT(
      bench("bench step good.txtpb --steps 1 --set train.precision=fp16"),
      HasSubstr("\nAttention: layer 0, heads 0 to 1 (sinkhorn): block attention is LibTorch's, "
                "because the dtype is fp16, not fp32 or fp64 or bf16.\n"));
}

TEST_F(BenchProcess, Attention) {
  const std::vector<std::string> mechanisms{"block_local", "sinkhorn { block: 16 iterations: 3 }",
                                            "dense"};
  const std::vector<std::string> candidates{"birkhoff", "LibTorch, composed", "LibTorch, eager",
                                            "LibTorch, dense"};
  // For dense attention, the dense candidate is the composition.
  const std::vector<std::string> of_dense{"birkhoff", "LibTorch, eager", "LibTorch, dense"};
  std::vector<double> errors;
  // Without AVX-512 LibTorch takes minutes for the product that measures the speed in bf16.
  std::vector<std::string> dtypes{"fp32"};
  if (is_supported(InstructionSet::kAvx512)) dtypes.emplace_back("bf16");
  for (const std::string& dtype : dtypes) {
    const std::string report = bench(
        "bench attention block_local 'sinkhorn { block: 16 iterations: 3 }' dense --lengths "
        "48,80 --batch 2 --heads 2 --head-dim 8 --rounds 2 --svg time.svg --table table.md "
        "--dtype " +
        dtype);
    EXPECT_EQ(read_bytes(path("table.md")), report);
    const auto rows = rows_of(report);
    std::size_t row = 0;
    for (const std::string& mechanism : mechanisms) {
      for (const char* const length : {"48", "80"}) {
        for (const std::string& candidate : mechanism == "dense" ? of_dense : candidates) {
          ASSERT_LT(row, rows.size()) << report;
          ASSERT_EQ(rows[row].size(), 12u) << report;
          EXPECT_EQ(rows[row][0], mechanism);
          EXPECT_EQ(rows[row][1], length);
          EXPECT_EQ(rows[row][2], candidate);
          expect_figures({rows[row].begin() + 2, rows[row].end()});
          ++row;
        }
      }
    }
    EXPECT_EQ(row, rows.size()) << report;
    errors.push_back(std::stod(rows[0][11]));
    const std::string plot = read_bytes(path("time.svg"));
    EXPECT_THAT(plot, StartsWith("<svg "));
    EXPECT_THAT(plot, testing::EndsWith("</svg>\n"));
    for (const std::string& mechanism : mechanisms) {
      EXPECT_THAT(plot, HasSubstr(">" + mechanism + ": birkhoff</text>"));
      EXPECT_THAT(plot, HasSubstr(">" + mechanism + ": floor</text>"));
    }
    std::size_t points = 0;
    for (std::size_t at = 0; (at = plot.find("<circle", at)) != std::string::npos; ++at) ++points;
    EXPECT_EQ(points, rows.size() + 2 * mechanisms.size()) << "a point for each row and floor";
  }
  if (errors.size() > 1) {
    EXPECT_LT(100 * errors[0], errors[1]) << "bf16 is coarser than fp32";
  }
  EXPECT_THAT(
      bench("bench attention block_local --lengths 32 --heads 1 --head-dim 264 --batch 1 "
            "--rounds 1"),
      HasSubstr("\nblock_local at L = 32: block attention is LibTorch's, because a head has "
                "264 channels, more than 256.\n"));
  // Encoders too, and fp64.
  EXPECT_EQ(rows_of(bench("bench attention sinkhorn --lengths 32 --heads 1 --head-dim 4 --batch 1 "
                          "--rounds 1 --encoder --dtype fp64"))
                .size(),
            4u);
  if (errors.size() == 1) GTEST_SKIP() << "bf16, because this CPU has no AVX-512";
}

TEST(Attention, AnErrorIsRelativeToItsTensor) {
  const at::Tensor large = at::full({3}, 1000., at::kDouble),
                   small = at::full({2}, 1e-3, at::kDouble);
  EXPECT_NEAR(error_of({large + 1, small}, {large, small}), 1e-3, 1e-12);
  EXPECT_NEAR(error_of({small + 1e-4, large}, {small, large}), 0.1, 1e-9);
  EXPECT_NEAR(error_of({large, small + 1e-4}, {large, small}), 0.1, 1e-9);
  EXPECT_TRUE(std::isnan(error_of({large / 0 * 0, small}, {large, small})));
  // A gradient that is negligible compared with the others need not be exact.
  EXPECT_NEAR(error_of({large, large, small + 1e-4}, {large, large, small}), 8.16e-5, 1e-7);
}

TEST_F(BenchProcess, CommOnTwoAndThreeRanks) {
  for (const char* const ranks : {"2", "3"}) {
    const std::string report =
        bench(std::string("bench comm --bytes 64-4K --rounds 2 --ranks ") + ranks,
              std::string("; ") + ranks +
                  " ranks of `birkhoff bench comm --device cpu --bytes 64-4K --rounds 2`");
    const auto rows = rows_of(report);
    ASSERT_EQ(rows.size(), 5u * 4u) << report;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i][0], collective_name(kCollectives[i / 4]));
      ASSERT_EQ(rows[i].size(), 9u) << report;
      EXPECT_EQ(std::stoll(rows[i][1]) % (4 * std::stoll(ranks)), 0) << "not whole elements";
      expect_figures(rows[i]);
    }
  }
}

// What the groups send in a replayed step is what plan says. Virtual shards send unequal parts,
// which a replay makes equal.
TEST_F(BenchProcess, CommOfAStepSendsWhatIsPlanned) {
  struct Case {
    std::string settings;
    int ranks;
    std::vector<std::string> groups;
  };
  for (const auto& [settings, ranks, groups] :
       {Case{"", 2, {"world", "data"}}, Case{" --set mesh.tensor=2", 2, {"world", "tensor"}},
        Case{" --set train.zero_stage=3", 2, {"world", "data"}},
        Case{" --set train.invariant.shards=2", 2, {"world", "data"}},
        Case{" --set mesh.ranks_per_node=2 --set mesh.zero_inside_nodes=true --set "
             "train.zero_stage=3",
             4,
             {"world", "data", "inside nodes", "across nodes"}}}) {
    const std::string line = "bench comm good.txtpb" + settings;
    const std::string report =
        bench(line + " --rounds 2 --ranks " + std::to_string(ranks) + " --node-gbs 5 --node-us 3",
              "; " + std::to_string(ranks) + " ranks of `birkhoff " + line +
                  " --node-gbs 5 --node-us 3 --rounds 2`");
    const auto rows = rows_of(report);
    ASSERT_EQ(rows.size(), groups.size()) << report;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(rows[i].size(), 6u) << report;
      EXPECT_EQ(rows[i][0], groups[i]);
      expect_figures({rows[i].begin(), rows[i].end() - 1});
      if (settings.find("shards") == std::string::npos) {
        EXPECT_NEAR(std::stod(rows[i][4]), 1, 1e-3) << report;
      }
      EXPECT_EQ(rows[i][5], "0") << "there is one node";
    }
    EXPECT_GT(number_after(report, "A step takes "), 0) << report;
    EXPECT_GT(number_after(report, "Simulated: "), 0) << report;
  }
}

TEST_F(BenchProcess, CommOfAStepAsJson) {
  const Finished finished =
      run_child({.line = birkhoff_line(split_line(
                     "bench comm good.txtpb --ranks 2 --rounds 1 --json --node-gbs 5 --node-us 5")),
                 .folder = path("")});
  ASSERT_EQ(finished.code, 0) << finished.err;
  const auto json = nlohmann::json::parse(finished.out);
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_GT(json["step_seconds"], json["computation_seconds"]);
  EXPECT_GT(json["simulated_seconds"], json["computation_seconds"]) << finished.out;
  EXPECT_LT(json["forward_seconds"].get<double>() + json["backward_seconds"].get<double>(),
            json["computation_seconds"].get<double>());
  EXPECT_EQ(json["groups"]["data"]["sent_bytes"], json["groups"]["data"]["planned_bytes"]);
}

// A generated corpus of images is inspected, verified and measured like any other.
TEST_F(BenchProcess, LoaderOfRecords) {
  const auto run = [&](const std::string& line) {
    const Finished finished =
        run_child({.line = birkhoff_line(split_line(line)), .folder = path("")});
    EXPECT_EQ(finished.code, 0) << line << ": " << finished.err;
    return finished.out;
  };
  const std::string made = run("bench corpus imagenet64 --out images --scale 0.0005");
  EXPECT_THAT(made, HasSubstr("tokenizer    none: records without text\nsplit train  641 rows\n"
                              "  record image: 641 u8 x [64, 64, 3] in 1 shard\n"
                              "  label label: 1000 classes (class 0, class 1, "));
  EXPECT_EQ(run("inspect images"), made);
  EXPECT_THAT(run("verify images"), HasSubstr("images: corpus verified"));
  for (const std::string options : {"", " --record label", " --cold"}) {
    const std::string report = bench("bench loader images --rounds 1" + options);
    EXPECT_THAT(report,
                HasSubstr(options == " --record label" ? "rows of 'label', u16 []"
                                                       : "rows of 'image', u8 [64, 64, 3]"));
    EXPECT_EQ(rows_of(report).size(), options == " --cold" ? 3u : 9u) << report;
    expect_speeds(rows_of(report));
  }
}

TEST_F(BenchProcess, LoaderWithACorpusAndWithout) {
  const Finished prepared =
      run_child({.line = birkhoff_line(
                     {"prepare", "--out", path("corpus"), "--tokenizer", "words", path("text")})});
  ASSERT_EQ(prepared.code, 0) << prepared.err;
  for (const char* const corpus : {" corpus", " corpus --cold --length 256", ""}) {
    const std::string report = bench(std::string("bench loader --rounds 1") + corpus);
    const auto rows = rows_of(report);
    const bool cold = report.find("--cold") != std::string::npos;
    ASSERT_EQ(rows.size(), cold ? 3u : corpus[0] == '\0' ? 13u : 9u) << report;
    expect_speeds(rows);
    EXPECT_EQ(rows[1][0], cold ? "TrainLoader" : "TrainLoader, first epoch");
    EXPECT_EQ(rows[cold ? 2 : 8][0], "ratio");
    EXPECT_GT(number_after(report, "First batch: "), 0) << report;
    for (const auto& entry : fs::directory_iterator(path(""))) {
      EXPECT_EQ(entry.path().filename().string().rfind("birkhoff_bench_", 0), std::string::npos)
          << "left behind: " << entry.path();
    }
  }
}

}  // namespace
}  // namespace birkhoff
