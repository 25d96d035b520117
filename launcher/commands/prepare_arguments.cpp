// The arguments of `birkhoff prepare`.
#include "launcher/command_line.h"

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>

namespace birkhoff {

void CommandLine::add_prepare() {
  CLI::App* c = subcommand(
      app_, "prepare",
      "Make a corpus folder from text, pairs of texts, tables of labeled text, images or point sets",
      "  birkhoff prepare --out corpus/shakespeare --tokenizer chars shakespeare.txt\n"
      "  birkhoff prepare --out corpus/news --tokenizer sentencepiece --vocab-size 8000 "
      "--jsonl text news/*.jsonl.zst\n"
      "  birkhoff prepare --out corpus/wiki --tokenizer words --train wiki.train --valid "
      "wiki.valid --test wiki.test\n"
      "  birkhoff prepare --out corpus/more --like run/first more/\n"
      "  birkhoff prepare --out corpus/sst2 --tokenizer words --text-column sentence "
      "--label-column label --train train.tsv --valid dev.tsv --test test.tsv\n"
      "  birkhoff prepare --out corpus/mrpc --tokenizer words --text-column sentence1 "
      "--second-column sentence2 --label-column label --train train.tsv --valid dev.tsv\n"
      "  birkhoff prepare --out corpus/en-de --tokenizer sentencepiece --train train.en --target "
      "train.de --valid val.en --valid-target val.de\n"
      "  birkhoff prepare --out corpus/sort --generate sort --symbols 128 --train-length 64 --length "
      "128\n"
      "  birkhoff prepare --out corpus/pets --images --image-size 64 --channels 3 pets/\n"
      "  birkhoff prepare --out corpus/modelnet40 --points --train modelnet40/train_files.txt "
      "--test modelnet40/test_files.txt");
  c->add_option("--out", prepare_.out, "corpus folder to create")->required()->type_name("DIR");
  CLI::Option* tokenizer =
      c->add_option("--tokenizer", prepare_.tokenizer,
                    "bytes, chars, words, whitespace (words and line ends, as papers count them), "
                    "sentencepiece (trains a model), or a vocabulary or SentencePiece model file")
          ->capture_default_str();
  CLI::Option* like =
      c->add_option(
           "--like", prepare_.like,
           "use the tokenizer of this run, checkpoint or corpus (of pairs: both, if it has two); for "
           "tables also the classes; for "
           "images and point sets only these")
          ->type_name("RUN_OR_CORPUS")
          ->excludes(tokenizer);
  CLI::Option* vocabulary =
      c->add_option("--vocab-size", prepare_.vocabulary,
                    "maximum number of token ids, for words, whitespace and sentencepiece")
          ->check(CLI::Range(std::int64_t{2}, std::int64_t{10'000'000}));
  CLI::Option* lines = c->add_flag("--lines", prepare_.lines, "each line of a file is a document");
  CLI::Option* separator =
      c->add_option(
           "--separator", prepare_.separator,
           "a file holds documents with this text between them, for instance "
           "\"<|endoftext|>\"; a line end (\\n or \\r\\n) right after it belongs to it, unless it "
           "begins or ends in one itself")
          ->type_name("TEXT")
          ->excludes(lines);
  CLI::Option* jsonl =
      c->add_option("--jsonl", prepare_.jsonl,
                    "for JSON Lines: this field of the object in each line is a document")
          ->type_name("FIELD")
          ->excludes(lines)
          ->excludes(separator);
  // For pairs, whose sources are the other texts.
  const auto targets = [&](const char* name, std::vector<std::string>& paths, const char* what) {
    return c->add_option(name, paths, what)
        ->type_name("PATH ...")
        ->excludes(lines)
        ->excludes(separator)
        ->excludes(jsonl);
  };
  CLI::Option* target = targets(
      "--target", prepare_.targets,
      "for pairs: files of targets, as many as of sources (PATH or --train); line i of a file "
      "belongs to line i of its source");
  CLI::Option* valid_target = targets("--valid-target", prepare_.valid_targets,
                                      "for pairs: the targets of the files of --valid");
  CLI::Option* test_target = targets("--test-target", prepare_.test_targets,
                                     "for pairs: the targets of the files of --test");
  c->add_option("--source-tokenizer", prepare_.source_tokenizer,
                "for pairs: a tokenizer of the sources alone, as --tokenizer, which is then the "
                "targets'; else both share one")
      ->needs(target)
      ->excludes(like);
  CLI::Option* text_column =
      c->add_option(
           "--text-column", prepare_.text_column,
           "for tables (.tsv), whose rows are documents: column of the text, by name or by number "
           "from 1")
          ->type_name("COLUMN");
  CLI::Option* second_column =
      c->add_option("--second-column", prepare_.second_column,
                    "for tables whose rows are pairs of texts: column of the second text, by name "
                    "or by number from 1")
          ->type_name("COLUMN");
  CLI::Option* label_column =
      c->add_option("--label-column", prepare_.label_column,
                    "for tables: column of the label, by name or by number from 1")
          ->type_name("COLUMN");
  CLI::Option* header =
      c->add_flag("--header", prepare_.header,
                  "for tables with columns given by number: skip the first line of each file");
  CLI::Option* generate =
      c->add_option(
           "--generate", prepare_.generate,
           "make pairs of generated symbols instead of reading an input: the target is the "
           "source (copy), its reverse, or its symbols sorted")
          ->check(CLI::IsMember(GeneratedPairs::tasks()));
  for (CLI::Option* other : std::initializer_list<CLI::Option*>{
           tokenizer, like, vocabulary, lines, separator, jsonl, target, valid_target, test_target,
           text_column, second_column, label_column, header})
    generate->excludes(other);
  GeneratedPairs& pairs = prepare_.generated;
  add_number(c, "--symbols", pairs.symbols, 1, GeneratedPairs::kMaxSymbols,
             "for --generate: number of different symbols")
      ->needs(generate);
  add_number(c, "--train-length", pairs.train_length, 1, GeneratedPairs::kMaxLength,
             "for --generate: maximum number of symbols of a source of train")
      ->needs(generate);
  add_number(c, "--length", pairs.length, 1, GeneratedPairs::kMaxLength,
             "for --generate: the same of valid and test")
      ->needs(generate);
  add_number(c, "--samples", pairs.samples, 1, std::int64_t{1} << 32,
             "for --generate: number of pairs of train")
      ->needs(generate);
  add_number(c, "--test-samples", pairs.test_samples, 1, std::int64_t{1} << 32,
             "for --generate: number of pairs of valid, and of test")
      ->needs(generate);
  add_number(c, "--seed", pairs.seed, 0, std::numeric_limits<std::uint64_t>::max(),
             "for --generate: another seed gives other pairs")
      ->needs(generate);
  CLI::Option* images =
      c->add_flag(
           "--images", prepare_.images,
           "the input is images: folders of PNG and JPEG files (a class each, or unlabeled), "
           "MNIST's idx, CIFAR's binary files, npz batches")
          ->excludes(tokenizer)
          ->excludes(lines)
          ->excludes(separator)
          ->excludes(jsonl)
          ->excludes(generate);
  c->add_option("--image-size", prepare_.image_size,
                "resize images to cover this size, and crop them to it at the center")
      ->type_name("N or ROWSxCOLUMNS")
      ->needs(images);
  c->add_option("--channels", prepare_.channels, "convert images to gray (1) or to color (3)")
      ->check(CLI::IsMember({1, 3}))
      ->needs(images);
  c->add_flag("--points", prepare_.points,
              "the input is point sets: files of ModelNet40's HDF5 format, or lists of them (.txt)")
      ->excludes(tokenizer)
      ->excludes(lines)
      ->excludes(separator)
      ->excludes(jsonl)
      ->excludes(images)
      ->excludes(generate);
  c->add_flag("--unlabeled", prepare_.unlabeled, "make no labels of images or point sets");
  c->add_flag(
      "--skip-damaged", prepare_.skip_damaged,
      "skip and count images or files of point sets that cannot be read, instead of ending");
  add_number(c, "--ranks", prepare_.ranks, 1, 4096,
             "divide the work among this many MPI ranks here; the bytes stay the same")
      ->excludes(generate);
  // run() reads these values in the order of the command line.
  const auto texts = [c](const char* name, const char* what, const char* type) {
    c->add_option(name)
        ->description(what)
        ->expected(1, CLI::detail::expected_max_vector_size)
        ->allow_extra_args()
        ->type_name(type);
  };
  texts("--valid",
        "validation split: the fraction of the bytes to hold out (default 0.1), or its texts",
        "FRACTION or PATH ...");
  texts("--test", "test split: the fraction of the bytes to hold out (default 0), or its texts",
        "FRACTION or PATH ...");
  texts("--train", "texts to train on; use it instead of PATH if --valid or --test name texts",
        "PATH ...");
  texts("PATH",
        "files (text may be gzip or zstd data), folders, or (for text) - for standard input", "");
}

// CLI11 returns values per option; only parse_order() knows the order across options.
void CommandLine::take_prepare_order() {
  std::map<const CLI::Option*, std::size_t> num_taken;
  for (const CLI::Option* option : app_.get_subcommand("prepare")->parse_order()) {
    const std::string name = option->get_name();
    const std::string value = option->results().at(num_taken[option]++);
    if (name == "--valid" || name == "--test" || name == "--train" || name == "PATH") {
      prepare_.texts.push_back({name, value});
    } else if (name != "--ranks") {
      prepare_.for_ranks.push_back(name + "=" + value);
    }
  }
}

}  // namespace birkhoff
