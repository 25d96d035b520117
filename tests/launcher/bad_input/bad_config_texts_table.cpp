// Configurations that are not Protobuf text of our schema, paths that are not files, and includes.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

// A configuration text in bad.txtpb, read by `config print`.
BadInput text(std::string name, std::string bytes, std::vector<std::string> words) {
  words.push_back("bad.txtpb");
  return {.name = "config " + name,
          .line = "config print bad.txtpb",
          .code = ExitCode::kConfig,
          .words = std::move(words),
          .spoil = [bytes = std::move(bytes)] { write_bytes("bad.txtpb", bytes); }};
}

BadInput file(std::string name, std::string line, std::vector<std::string> words,
              std::function<void()> spoil = {}) {
  return {.name = "config " + name,
          .line = "config print " + line,
          .code = ExitCode::kConfig,
          .words = std::move(words),
          .spoil = std::move(spoil)};
}

std::string repeated(const std::string& part, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += part;
  return all;
}

std::vector<BadInput> syntax() {
  return {
      as_process_too(text("brace not closed", "task { language_model {} }\ntrain { steps: 5\n",
                          {"bad.txtpb:3:1", "'}'", "end of the text"})),
      text("brace too many", "task { language_model {} }\n}\n", {"bad.txtpb:2:1", "'}'"}),
      text("value missing", "train { steps: }", {":16", "train.steps", "expected an integer"}),
      text("colon missing", "train { steps 5 }", {"train.steps", "':'"}),
      text("equals sign", "train { steps = 5 }", {"train.steps", "':'", "'='"}),
      text("two values", "train { steps: 1 2 }", {"expected a field name", "'2'"}),
      text("quote not closed", "data { corpus: \"here }\n", {"bad.txtpb:1"}),
      text("C comment", "/* tiny */ task { language_model {} }", {"bad.txtpb:1:1"}),
      text("JSON", "{\"task\": {\"language_model\": {}}}", {"bad.txtpb:1:1"}),
      text("YAML", "task:\n  language_model:\n", {"bad.txtpb"}),
      text("empty", "", {"task", "no task is chosen"}),
      text("of comments alone", "# nothing yet\n", {"task", "no task is chosen"}),
      text("with a zero byte", std::string("task { language_model {} }\0", 27), {":1:27", "0x00"}),
      text("in Latin-1", "task { language_model {} }\n# caf\xe9\n", {":2:6", "0xe9", "UTF-8"}),
      text("in UTF-16", std::string("\xff\xfet\0a\0", 6), {":1:4", "0x00"}),
      text("nested too deep",
           "task { language_model " + repeated("{ x ", 120) + repeated("}", 120) + "}",
           {"bad.txtpb:1"}),
      text("larger than allowed", std::string((4 << 20) + 1, '#'), {"4194304"}),
      text("field given twice", "train { steps: 1\nsteps: 2 }", {":2:", "train.steps", "twice"}),
      text("two choices of a oneof", "task { language_model {}\ntranslation {} }",
           {":2:", "second choice", "language_model"}),
      text("unknown field at the top", "trian { steps: 5 }",
           {":1:1", "unknown field 'trian'", "did you mean 'train'"}),
      text("unknown field inside", "train {\n  stepz: 5 }",
           {":2:3", "'stepz'", "did you mean 'steps'"}),
      text("field of another message", "steps: 5", {"unknown field 'steps'", "train.steps"}),
      text("unknown value of an enum", "train { schedule { shape: cosin } }",
           {"train.schedule.shape", "'cosin'", "constant", "'cosine'"}),
      text("enum in capitals", "train { schedule { shape: COSINE } }",
           {"train.schedule.shape", "'COSINE'", "allowed"}),
      text("enum as a number out of range", "train { schedule { shape: 17 } }",
           {"train.schedule.shape", "17"}),
      text("enum in quotes", "train { schedule { shape: \"cosine\" } }",
           {"train.schedule.shape", "expected one of"}),
      text("truth value neither way", "model { bias: maybe }",
           {"model.bias", "true or false", "'maybe'"}),
      text("truth value 2", "model { bias: 2 }", {"model.bias", "2"}),
      text("with a byte order mark and an error", "\xef\xbb\xbftrain { stepz: 1 }",
           {"bad.txtpb:1:9", "'stepz'", "did you mean 'steps'"}),
      text("with two byte order marks", "\xef\xbb\xbf\xef\xbb\xbftask {}", {"bad.txtpb:1:1"}),
      text("octal number", "model {\n  layers: 010 }",
           {"bad.txtpb:2:11", "model.layers", "'010' starts with a zero"}),
      text("no octal number either", "train { seed: 09 }", {":1:15", "train.seed", "'09'"}),
      text("exponent of an integer", "train { steps: 1e3 }",
           {"train.steps", "expected an integer", "'1e3'", "write 1000"}),
      text("GPU by its other name", "device: gpu", {"device", "'gpu'", "did you mean 'cuda'"}),
      text("fraction for an integer", "train { steps: 1.5 }", {"train.steps", "integer", "1.5"}),
      text("string for a number", "train { steps: \"5\" }", {"train.steps", "integer"}),
      text("word for a number", "train { clip_norm: high }",
           {"train.clip_norm", "number", "'high'"}),
      text("number for a string", "data { corpus: 5 }", {"data.corpus", "string in quotes", "'5'"}),
      text("word for a string", "data { corpus: here }", {"data.corpus", "string in quotes"}),
      text("number beyond 32 bits", "model { layers: 4294967296 }",
           {"model.layers", "4294967296", "fit"}),
      text("number beyond 64 bits", "train { steps: 99999999999999999999 }",
           {"train.steps", "99999999999999999999"}),
      text("negative seed", "train { seed: -1 }", {"train.seed", "at least 0"}),
      text("message for a number", "train { steps { } }", {"train.steps", "':'"}),
      text("number for a message", "train: 3", {"train", "'{'"}),
      text("list for a single field", "train { steps: [1, 2] }", {"train.steps"}),
      text("extension", "[birkhoff.configs.fixed]: true", {"bad.txtpb:1"}),
      text("control character in a string", "data { corpus: \"a\\nb\" }",
           {"data.corpus", "control character"}),
  };
}

std::vector<BadInput> files() {
  return {
      as_process_too(file("missing", "nowhere.txtpb", {"nowhere.txtpb", "No such file"})),
      file("a folder", "text", {"text", "is a folder"}),
      file("a device", "/dev/zero", {"/dev/zero", "not a regular file"}),
      file("empty path", "''", {"No such file"}),
      file("a link to itself", "loop.txtpb", {"loop.txtpb", "symbolic links"},
           [] { std::filesystem::create_symlink("loop.txtpb", "loop.txtpb"); }),
      file("a corpus' manifest", "corpus/manifest.json", {"corpus/manifest.json:1:1"}),
      {.name = "config diff against a missing file",
       .line = "config diff good.txtpb nowhere.txtpb",
       .code = ExitCode::kConfig,
       .words = {"nowhere.txtpb", "No such file"}},
      {.name = "config diff against a bad text",
       .line = "config diff good.txtpb bad.txtpb",
       .code = ExitCode::kConfig,
       .words = {"bad.txtpb:1:9", "stepz"},
       .spoil = [] { write_bytes("bad.txtpb", "train { stepz: 1 }"); }},
      {.name = "config with a line end in its name",
       .code = ExitCode::kConfig,
       .words = {"No such file"},
       .arguments = {"config", "print", "no\nwhere.txtpb"}},
  };
}

std::vector<BadInput> includes() {
  return {
      file("includes a missing file", "bad.txtpb",
           {"bad.txtpb:2:1", "include", "base.txtpb", "No such file"},
           [] { write_bytes("bad.txtpb", "# more\ninclude: \"base.txtpb\"\n"); }),
      file("includes itself", "bad.txtpb", {"cycle", "bad.txtpb -> bad.txtpb"},
           [] { write_bytes("bad.txtpb", "include: \"bad.txtpb\"\n"); }),
      file("includes in a cycle of two", "a.txtpb", {"cycle", "a.txtpb -> b.txtpb -> a.txtpb"},
           [] {
             write_bytes("a.txtpb", "include: \"b.txtpb\"\n");
             write_bytes("b.txtpb", "include: \"a.txtpb\"\n");
           }),
      file("includes from outside its folder", "configs/bad.txtpb",
           {"configs/bad.txtpb:1:1", "outside the folder"},
           [] { write_bytes("configs/bad.txtpb", "include: \"../good.txtpb\"\n"); }),
      file("includes outside through a link", "configs/bad.txtpb", {"outside the folder"},
           [] {
             write_bytes("configs/bad.txtpb", "include: \"link.txtpb\"\n");
             std::filesystem::create_symlink("../good.txtpb", "configs/link.txtpb");
           }),
      file("includes an absolute path", "bad.txtpb", {"'/etc/passwd'", "relative"},
           [] { write_bytes("bad.txtpb", "include: \"/etc/passwd\"\n"); }),
      file("includes an empty name", "bad.txtpb", {"''", "relative"},
           [] { write_bytes("bad.txtpb", "include: \"\"\n"); }),
      file("includes a folder", "bad.txtpb", {"text", "is a folder"},
           [] { write_bytes("bad.txtpb", "include: \"text\"\n"); }),
      file("includes a damaged text", "bad.txtpb", {"base.txtpb:1:9", "stepz"},
           [] {
             write_bytes("bad.txtpb", "include: \"base.txtpb\"\n");
             write_bytes("base.txtpb", "train { stepz: 1 }\n");
           }),
      file("includes a value out of range", "bad.txtpb", {"base.txtpb:1:9", "train.steps", "0"},
           [] {
             write_bytes("bad.txtpb", "include: \"base.txtpb\"\n");
             write_bytes("base.txtpb", "train { steps: 0 }\n");
           }),
      file("includes too deep", "deep/0.txtpb", {"deeper than 32"},
           [] {
             for (int i = 0; i < 40; ++i) {
               write_bytes("deep/" + std::to_string(i) + ".txtpb",
                           "include: \"" + std::to_string(i + 1) + ".txtpb\"\n");
             }
           }),
      file("includes too many", "bad.txtpb", {"more than 256 files"},
           [] {
             write_bytes("base.txtpb", "");
             write_bytes("bad.txtpb", repeated("include: \"base.txtpb\"\n", 300));
           }),
  };
}

}  // namespace

std::vector<BadInput> bad_config_texts() {
  std::vector<BadInput> rows;
  for (auto table : {syntax, files, includes}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
