// The command line: every subcommand with its options and their parsed values. One function
// declares a subcommand; run() passes the values to its function in commands.h.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "launcher/commands.h"

namespace birkhoff {

// Adds an option for a number from `least` to `most`; the help shows its default.
template <typename T>
CLI::Option* add_number(CLI::App* command, const char* name, T& value,
                        std::type_identity_t<T> least, std::type_identity_t<T> most,
                        const char* what) {
  return command->add_option(name, value, what)
      ->check(CLI::Range(least, most))
      ->capture_default_str();
}
template <typename T>
CLI::Option* add_number(CLI::App* command, const char* name, std::optional<T>& value,
                        std::type_identity_t<T> least, std::type_identity_t<T> most,
                        const char* what) {
  return command->add_option(name, value, what)->check(CLI::Range(least, most));
}

class CommandLine {
 public:
  CommandLine();  // declares all subcommands

  // Runs the subcommand that app() has parsed. arguments: the whole command line, as it was given.
  int run(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err);

  CLI::App& app() { return app_; }

 private:
  CLI::App* subcommand(CLI::App& parent, const char* name, const char* what, const char* examples);
  CLI::Option* add_settings(CLI::App* command, std::vector<std::string>& settings);
  CLI::Option* add_device(
      CLI::App* command, std::string& device,
      const char* what = "cpu or cuda; need not be the device that trained the model");
  void add_rounds(CLI::App* command, int& rounds);
  void add_tensor(CLI::App* command, int& tensor,
                  const char* what = "divide each replica of the model over this many ranks");
  // needed: an option without which these have no effect; null: none.
  void add_links(CLI::App* command, LinkArguments& links, CLI::Option* needed = nullptr);

  void add_prepare();         // this and the next: commands/prepare_arguments.cpp
  void take_prepare_order();  // sets what depends on the order of the arguments
  void add_train();
  void add_plan();
  void add_doctor();
  void add_eval();
  void add_sample();
  void add_generate();  // this and the next four: decoding/command_line.cpp
  void add_score();
  void add_bleu();
  void add_average();
  void add_export();
  void add_classify();
  void add_inspect();
  void add_runs();
  void add_compare();
  void add_verify();
  void add_analyse();
  void add_transport();
  void add_config();
  void add_submit();  // this and the next: slurm/command_line.cpp
  void add_looks();
  void add_bench();  // this and the next two: bench/command_line.cpp
  void add_bench_attention(CLI::App& bench);
  int run_bench(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err);

  CLI::App app_{"Birkhoff trains Transformers with sparse and doubly stochastic attention.",
                "birkhoff"};
  PrepareArguments prepare_;
  TrainArguments train_;
  PlanArguments plan_;
  DoctorArguments doctor_;
  EvalArguments eval_;
  SampleArguments sample_;
  GenerateArguments generate_;
  ScoreArguments score_;
  BleuArguments bleu_;
  AverageArguments average_;
  ExportArguments export_;
  ClassifyArguments classify_;
  InspectArguments inspect_;
  RunsArguments runs_;
  CompareArguments compare_;
  AnalyseArguments analyse_;
  TransportArguments transport_;
  BenchLoaderArguments bench_loader_;
  BenchCommArguments bench_comm_;
  BenchCorpusArguments bench_corpus_;
  BenchStepArguments bench_step_;
  BenchAttentionArguments bench_attention_;
  SubmitArguments submit_;
  StatusArguments status_;
  TailArguments tail_;
  std::string cancel_run_;
  std::string verify_path_;
  std::string config_file_, config_before_, config_after_;
  std::vector<std::string> config_settings_;
};

}  // namespace birkhoff
