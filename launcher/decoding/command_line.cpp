// The subcommands that use a trained model of text line by line, BLEU, and folders of weights:
// generate, score, bleu, average, export.
#include "launcher/command_line.h"

namespace birkhoff {

void CommandLine::add_generate() {
  CLI::App* c = subcommand(
      app_, "generate", "Generate a text for each line of a file, by beam search or sampling",
      "  birkhoff generate run/first --input prompts.txt --out texts.txt --max-tokens 50\n"
      "  birkhoff generate run/first --input prompts.txt --temperature 0.8 --top-p 0.95 --json\n"
      "  birkhoff generate run/en-de --input test.en --out test.de --ranks 2\n"
      "  birkhoff generate run/en-de --split test --score bleu");
  c->add_option("PATH", generate_.path, "run folder (its newest checkpoint) or checkpoint")
      ->required();
  CLI::Option* input =
      c->add_option("--input", generate_.input,
                    "file with a source or prompt on each line; - for standard input")
          ->capture_default_str()
          ->type_name("FILE");
  CLI::Option* split = c->add_option("--split", generate_.split,
                                     "generate the targets of a split of pairs: valid or test")
                           ->check(CLI::IsMember({"valid", "test"}))
                           ->excludes(input);
  c->add_option("--corpus", generate_.corpus, "its corpus folder; default: the run's own")
      ->type_name("DIR")
      ->needs(split);
  CLI::Option* score =
      c->add_option("--score", generate_.score,
                    "print this score of the split; the texts go to --out, if it names a file")
          ->check(CLI::IsMember({"bleu", "exact_match"}))
          ->needs(split);
  c->add_option("--tokenize", generate_.tokenize, "tokenizer of BLEU")
      ->check(CLI::IsMember({"13a", "intl", "none"}))
      ->capture_default_str()
      ->needs(score);
  CLI::Option* forced =
      c->add_flag("--teacher-forced", generate_.teacher_forced,
                  "predict each token after the true ones before it, as Tensor2Tensor's evaluation")
          ->needs(score);
  c->add_option("--out", generate_.output,
                "file to write when all lines are done; - for standard output")
      ->capture_default_str()
      ->type_name("FILE");
  CLI::Option* beam = add_number(c, "--beam", generate_.beam, 1, 1024,
                                 "sequences that beam search keeps; 1 is greedy search");
  CLI::Option* penalty =
      add_number(c, "--length-penalty", generate_.length_penalty, 0.0, 100.0,
                 "A: log-probabilities of n tokens are divided by ((C + n) / (C + 1))^A");
  CLI::Option* offset =
      add_number(c, "--length-offset", generate_.length_offset, 0.0, 1e6,
                 "C: 5 is the penalty of GNMT and Tensor2Tensor, 0 fairseq's n^A");
  CLI::Option* temperature =
      add_number(c, "--temperature", generate_.temperature, 0.0, 100.0,
                 "sample at this temperature instead of searching; 0 is greedy search");
  temperature->excludes(beam)->excludes(penalty)->excludes(offset);
  forced->excludes(beam)->excludes(penalty)->excludes(offset)->excludes(temperature);
  add_number(c, "--top-k", generate_.top_k, 0, 10'000'000,
             "sample from the k most likely tokens; 0 = all")
      ->needs(temperature);
  add_number(c, "--top-p", generate_.top_p, 0.0, 1.0,
             "of the top k, sample from the fewest whose probabilities add up to p; 1 = all")
      ->needs(temperature);
  add_number(c, "--seed", generate_.seed, 0, std::int64_t{1} << 62,
             "the same seed gives the same texts")
      ->needs(temperature);
  forced->excludes(add_number(c, "--max-tokens", generate_.max_tokens, 1, 10'000'000,
                              "maximum number of tokens of a text; default: 50 more than the "
                              "source has; after a prompt, 200"));
  add_number(c, "--batch", generate_.batch, 1, 65536, "maximum number of lines at a time");
  forced->excludes(c->add_flag("--json", generate_.json,
                               "print one JSON object per line (see docs/decoding.md)"));
  add_device(c, generate_.device);
  add_number(c, "--ranks", generate_.ranks, 1, 4096,
             "start this many MPI ranks here and divide the lines among them");
  add_tensor(c, generate_.tensor);
}

void CommandLine::add_score() {
  CLI::App* c = subcommand(
      app_, "score", "Compute the log-likelihood of each text of a JSON Lines file",
      "  birkhoff score run/first --input questions.jsonl > scores.jsonl\n"
      "  echo '{\"context\": \"To be or\", \"continuation\": \" not to be\"}' | birkhoff score "
      "run/first");
  c->add_option("PATH", score_.path, "run folder (its newest checkpoint) or checkpoint")
      ->required();
  c->add_option("--input", score_.input,
                "file of objects with \"context\" and \"continuation\", with \"text\", or with "
                "\"source\" and \"target\"; - for standard input")
      ->capture_default_str()
      ->type_name("FILE");
  add_device(c, score_.device);
  add_number(c, "--ranks", score_.ranks, 1, 4096,
             "start this many MPI ranks here and divide the lines among them");
  add_tensor(c, score_.tensor);
}

void CommandLine::add_bleu() {
  CLI::App* c = subcommand(app_, "bleu", "Compute BLEU of translations, as sacreBLEU does",
                           "  birkhoff bleu translations.de references.de\n"
                           "  birkhoff bleu - references.de --tokenize intl --json");
  c->add_option("HYPOTHESES", bleu_.hypotheses,
                "file with a translation on each line; - for "
                "standard input")
      ->required();
  c->add_option("REFERENCES", bleu_.references, "files with the same number of lines")->required();
  c->add_option("--tokenize", bleu_.tokenize, "tokenizer of sacreBLEU")
      ->check(CLI::IsMember({"13a", "intl", "none"}))
      ->capture_default_str();
  c->add_flag("--json", bleu_.json, "print one JSON object (see docs/decoding.md)");
}

void CommandLine::add_average() {
  CLI::App* c = subcommand(app_, "average", "Average the weights of a run's newest checkpoints",
                           "  birkhoff average run/first --last 5 --out run/first-mean\n"
                           "  birkhoff eval run/first-mean");
  c->add_option("RUN", average_.run, "run folder")->required();
  add_number(c, "--last", average_.last, 2, 10'000, "number of checkpoints, the newest");
  c->add_option("--out", average_.out, "folder to make, which other commands read like a run's")
      ->required()
      ->type_name("DIR");
}

void CommandLine::add_export() {
  CLI::App* c = subcommand(app_, "export", "Write the weights of a checkpoint alone",
                           "  birkhoff export run/first --out weights/first\n"
                           "  birkhoff sample weights/first --prompt 'To be'");
  c->add_option("PATH", export_.path, "run folder (its newest checkpoint) or checkpoint")
      ->required();
  c->add_option("--out", export_.out, "folder to make, which other commands read like a run's")
      ->required()
      ->type_name("DIR");
}

}  // namespace birkhoff
