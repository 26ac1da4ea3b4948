// Checks the shape of the source tree: which directories may include which (docs/design.md), which headers must not be
// included in headers, and what every header begins with.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "formats/registry.h"

namespace reshard::architecture_test {
namespace {

namespace fs = std::filesystem;

struct SourceFile {
  std::string path;  // from the root, "lib/base/file.h"
  std::string text;

  bool is_header() const { return path.ends_with(".h") || path.ends_with(".cuh"); }
};

struct Include {
  std::string name;
  bool quoted;
};

bool ends_with_any(const std::string& path, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(), [&](const std::string& e) { return path.ends_with(e); });
}

std::vector<SourceFile> files_under(const std::vector<std::string>& folders, const std::vector<std::string>& endings) {
  const fs::path root = RESHARD_SOURCE_DIR;
  std::vector<SourceFile> out;
  for (const std::string& folder : folders) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string path = fs::relative(entry.path(), root).string();
      if (!entry.is_regular_file() || !ends_with_any(path, endings)) continue;
      std::ostringstream text;
      text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
      out.push_back({path, text.str()});
    }
  }
  return out;
}

std::vector<SourceFile> sources() { return files_under({"lib", "formats", "tools"}, {".h", ".cc", ".cu", ".cuh"}); }

std::vector<Include> includes_of(const SourceFile& file) {
  std::vector<Include> out;
  std::istringstream lines(file.text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("#include")) continue;
    const std::size_t open = line.find_first_of("<\"");
    if (open == std::string::npos) continue;
    const std::size_t close = line.find(line[open] == '<' ? '>' : '"', open + 1);
    out.push_back({line.substr(open + 1, close - open - 1), line[open] == '"'});
  }
  return out;
}

// Returns the layer of a file. lib/device/cuda, lib/base/storage and tools/report belong to their parents:
// "lib/base/file.h" -> "lib/base"; "lib/convert/view/repair.h" -> "lib/convert/view"; "formats/registry.h" ->
// "formats".
std::string layer_of(const std::string& path) {
  std::string out = path.substr(0, path.rfind('/'));
  if (out == "lib/device/cuda") out = "lib/device";
  if (out == "lib/base/storage") out = "lib/base";
  return out.starts_with("tools/") ? "tools" : out;
}

// Returns the layers, or single headers, that each layer may include besides itself.
const std::map<std::string, std::vector<std::string>>& allowed() {
  static const std::map<std::string, std::vector<std::string>> kAllowed = {
      {"lib/base", {}},
      {"lib/layout", {"lib/base"}},
      {"lib/checkpoint", {"lib/base", "lib/layout"}},
      {"lib/device", {"lib/base", "lib/layout"}},
      {"lib/transport", {"lib/base", "lib/device"}},
      {"lib/model", {"lib/base", "lib/layout", "lib/checkpoint"}},
      {"lib/plan", {"lib/base", "lib/layout", "lib/checkpoint", "lib/device"}},
      {"lib/source", {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/transport"}},
      {"lib/output", {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/transport", "lib/source"}},
      {"lib/engine",
       {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/transport", "lib/plan", "lib/source",
        "lib/output"}},
      {"lib/image",
       {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/plan", "lib/source", "lib/output",
        "lib/engine"}},
      {"lib/infer", {"lib/base", "lib/layout", "lib/checkpoint", "lib/model"}},
      {"lib/audit",
       {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/transport", "lib/model", "lib/source",
        "lib/engine", "lib/infer"}},
      {"lib/forecast", {"lib/base", "lib/layout", "lib/model", "lib/audit"}},
      {"lib/convert/view",
       {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/model", "lib/source", "lib/engine",
        "lib/audit"}},
      {"lib/convert/weights",
       {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/transport", "lib/model", "lib/source",
        "lib/engine", "lib/image", "lib/convert/view"}},
      {"lib/convert",
       {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/transport", "lib/model", "lib/plan",
        "lib/source", "lib/output", "lib/engine", "lib/image", "lib/audit", "lib/convert/view", "lib/convert/weights"}},
      {"lib/load",
       {"lib/base", "lib/layout", "lib/checkpoint", "lib/device", "lib/transport", "lib/model", "lib/plan",
        "lib/source", "lib/engine", "lib/convert", "lib/convert/view"}},
      // Megatron's torch_dist is PyTorch DCP under other names.
      {"formats/megatron", {"lib", "formats/encoding", "formats/tensor_files", "formats/dcp/dcp.h"}},
      {"formats/encoding", {"lib/base", "lib/layout", "lib/checkpoint/catalog.h", "lib/device/crc32.h"}},
  };
  return kAllowed;
}

bool may_include(const std::string& from, const std::string& header) {
  const std::string layer = layer_of(from), target = layer_of(header);
  if (target == layer) return true;
  if (layer == "tools" || layer.starts_with("tools/")) return true;
  if (layer == "formats") return !target.starts_with("tools");  // the registry sees every format
  if (const auto row = allowed().find(layer); row != allowed().end())
    return std::any_of(row->second.begin(), row->second.end(), [&](const std::string& a) {
      return a == target || a == header || (a == "lib" && target.starts_with("lib/"));
    });
  // A format may include the library, the encodings and tensor_files, but no other format.
  return layer.starts_with("formats/") &&
         (target.starts_with("lib/") || target == "formats/encoding" || target == "formats/tensor_files");
}

TEST(Architecture, EveryLayerOfTheLibraryHasARow) {
  for (const SourceFile& file : sources())
    if (file.path.starts_with("lib/")) {
      EXPECT_TRUE(allowed().count(layer_of(file.path))) << file.path << ": add its layer to allowed()";
    }
}

TEST(Architecture, IncludesPointDownwards) {
  int seen = 0;
  for (const SourceFile& file : sources())
    for (const Include& include : includes_of(file)) {
      if (!include.quoted) continue;
      ++seen;
      EXPECT_TRUE(fs::exists(fs::path(RESHARD_SOURCE_DIR) / include.name))
          << file.path << ": \"" << include.name << "\" is not written from the root";
      EXPECT_TRUE(may_include(file.path, include.name)) << file.path << " must not include " << include.name;
    }
  EXPECT_GT(seen, 50);
}

// "lib/engine/run.cc" and "lib/engine/run.h" are one module.
std::string module_of(const std::string& path) { return path.substr(0, path.rfind('.')); }

// Returns a circle of modules that include each other, "a b a", or nothing.
std::string find_circle(const std::map<std::string, std::set<std::string>>& includes) {
  std::set<std::string> done;
  std::vector<std::string> path;
  std::string circle;
  const std::function<void(const std::string&)> visit = [&](const std::string& module) {
    if (!circle.empty() || done.contains(module)) return;
    const bool closes = std::find(path.begin(), path.end(), module) != path.end();
    path.push_back(module);
    if (closes) {
      for (auto m = std::find(path.begin(), path.end(), module); m != path.end(); ++m) circle += *m + " ";
      return;
    }
    if (const auto found = includes.find(module); found != includes.end())
      for (const std::string& next : found->second) visit(next);
    if (circle.empty()) path.pop_back();
    done.insert(module);
  };
  for (const auto& [module, next] : includes) visit(module);
  return circle;
}

// Modules that include each other because they are one thing in several files, each with its reason
// (docs/decisions.md).
const std::vector<std::vector<std::string>>& joined_modules() {
  static const std::vector<std::vector<std::string>> kJoined = {
      // A File may be at a URL, and a storage is read and cached by means of files.
      {"lib/base/file", "lib/base/storage/storage", "lib/base/storage/read_ahead"},
      // A value may be a list, a list consists of values, and one parser reads both, whole and in parts.
      {"lib/base/json", "lib/base/json_list", "lib/base/json_parts"},
      // The table of devices names each of them, and each is a Device.
      {"lib/device/device", "lib/device/cpu_device", "lib/device/cuda/context", "lib/device/cuda/cuda_device",
       "lib/device/cuda/pinned"},
      // A family and what is computed from its tables.
      {"lib/model/family", "lib/model/config", "lib/model/family_file", "lib/model/kept_dtypes",
       "lib/model/packed_layouts", "lib/model/parameters", "lib/model/parts", "lib/model/quantization",
       "lib/model/shapes"},
      // The steps of verify(), which take and fill its options and report.
      {"lib/audit/verification", "lib/audit/verification_steps"},
  };
  return kJoined;
}

// Returns the module, or the first of those that it is joined with.
std::string joined(const std::string& module) {
  for (const std::vector<std::string>& group : joined_modules())
    if (std::find(group.begin(), group.end(), module) != group.end()) return group.front();
  return module;
}

TEST(Architecture, NoModulesIncludeEachOtherInACircle) {
  std::map<std::string, std::set<std::string>> includes;
  for (const SourceFile& file : sources())
    for (const Include& include : includes_of(file)) {
      const std::string from = joined(module_of(file.path)), to = joined(module_of(include.name));
      if (include.quoted && from != to) includes[from].insert(to);
    }
  EXPECT_GT(includes.size(), 300U);
  EXPECT_EQ(find_circle(includes), "");
  EXPECT_EQ(find_circle({{"a", {"b"}}, {"b", {"c", "d"}}, {"d", {"b"}}}), "b d b ");
}

// The rooms that a conversion passes through are read from one end to the other, module by module.
TEST(Architecture, TheStraightLineHasNoCircles) {
  const std::vector<std::string> rooms = {"lib/source", "lib/output",  "lib/engine",
                                          "lib/image",  "lib/convert", "lib/convert/view",
                                          "lib/load",   "formats",     "lib/convert/weights"};
  for (const std::vector<std::string>& group : joined_modules())
    for (const std::string& module : group)
      EXPECT_EQ(std::count(rooms.begin(), rooms.end(), layer_of(module + ".h")), 0) << module;
}

TEST(Architecture, TheRulesRefuseWhatTheyAreFor) {
  EXPECT_FALSE(may_include("lib/base/file.h", "lib/layout/box.h"));
  EXPECT_FALSE(may_include("lib/layout/box.h", "lib/checkpoint/catalog.h"));
  EXPECT_FALSE(may_include("lib/engine/run.cc", "formats/registry.h"));
  EXPECT_FALSE(may_include("lib/device/copy.cc", "lib/checkpoint/catalog.h"));
  EXPECT_FALSE(may_include("formats/dcp/reader.cc", "formats/hf/reader.h"));
  EXPECT_FALSE(may_include("formats/encoding/zip.cc", "lib/checkpoint/format.h"));
  EXPECT_FALSE(may_include("formats/encoding/zip.cc", "lib/device/copy.h"));
  EXPECT_TRUE(may_include("formats/encoding/zip.cc", "lib/device/crc32.h"));
  EXPECT_TRUE(may_include("formats/dcp/reader.cc", "formats/encoding/zip.h"));
  EXPECT_TRUE(may_include("formats/registry.cc", "formats/dcp/dcp.h"));
}

TEST(Architecture, ForeignHeadersStayInSources) {
  const std::vector<std::string> foreign = {"nlohmann/", "zstd", "isa-l", "isal", "zlib",  "hdf5",
                                            "H5",        "mpi",  "cuda",  "nccl", "gtest", "curl"};
  for (const SourceFile& file : sources()) {
    if (!file.is_header()) continue;
    for (const Include& include : includes_of(file))
      for (const std::string& name : foreign)
        EXPECT_FALSE(!include.quoted && include.name.starts_with(name)) << file.path << " includes " << include.name;
  }
}

const std::string kLicence = "SPDX-License-Identifier: Apache-2.0\n";

TEST(Architecture, EverySourceNamesItsLicence) {
  for (const SourceFile& file : sources()) EXPECT_TRUE(file.text.starts_with("// " + kLicence)) << file.path;
  for (const SourceFile& file : files_under({"tools/python"}, {".py", ".pyi", ".txt"}))
    EXPECT_TRUE(file.text.starts_with("# " + kLicence)) << file.path;
}

// Files of all directories are compiled as one, and may use the same names for helpers.
TEST(Architecture, EveryTestFileHasANamespaceOfItsOwn) {
  const std::regex first_namespace("\nnamespace (reshard::[a-z0-9_:]+) \\{\n");
  std::map<std::string, std::string> files;
  for (const SourceFile& file : files_under({"tests"}, {"_test.cc", "_fuzz.cc"})) {
    if (file.path.starts_with("tests/cuda/")) continue;
    const std::string stem = std::filesystem::path(file.path).stem().string();
    std::smatch found;
    ASSERT_TRUE(std::regex_search(file.text, found, first_namespace)) << file.path;
    EXPECT_TRUE(found[1].str().ends_with(stem)) << file.path << ": " << found[1] << " does not end with " << stem;
    const auto [other, is_new] = files.emplace(found[1], file.path);
    EXPECT_TRUE(is_new) << file.path << " and " << other->second << " share " << found[1] << ": prefix the directory";
  }
}

TEST(Architecture, EveryHeaderSaysWhatItIsForAndIsReadOnce) {
  for (const SourceFile& file : files_under({"lib", "formats", "tools", "tests"}, {".h", ".cuh"})) {
    const std::size_t begin = file.text.starts_with("// " + kLicence) ? 3 + kLicence.size() : 0;
    EXPECT_EQ(file.text.compare(begin, 3, "// "), 0) << file.path << ": no comment at the top";
    const std::size_t once = file.text.find("#pragma once\n");
    ASSERT_NE(once, std::string::npos) << file.path;
    EXPECT_LT(once, file.text.find("#include")) << file.path;
  }
}

// A source in two: its string literals, and its code, in which literals, comments and includes are blank.
struct SourceText {
  std::string code;
  std::vector<std::string> literals;
};

SourceText split_source(const std::string& text) {
  SourceText out{text, {}};
  const auto skip_to = [&](std::size_t from, std::string_view what) {
    const std::size_t found = text.find(what, from);
    return found == std::string::npos ? text.size() : found + what.size();
  };
  for (std::size_t i = 0; i < text.size();) {
    const std::string_view rest = std::string_view(text).substr(i);
    const std::size_t begin = i;
    if (rest.starts_with("//") || rest.starts_with("#include")) {
      i = skip_to(i, "\n");
    } else if (rest.starts_with("/*")) {
      i = skip_to(i + 2, "*/");
    } else if (rest.starts_with("R\"")) {
      const std::string tag(rest.substr(2, rest.find('(') - 2));
      const std::size_t first = i + 3 + tag.size();
      i = skip_to(first, ")" + tag + "\"");
      out.literals.push_back(text.substr(first, i - first));
    } else if (rest[0] == '\'' && (i == 0 || !std::isalnum(static_cast<unsigned char>(text[i - 1])))) {
      i = skip_to(rest.starts_with("'\\") ? i + 3 : i + 2, "'");
    } else if (rest[0] == '"') {
      std::size_t end = i + 1;
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      out.literals.push_back(text.substr(i + 1, end - i - 1));
      i = end + 1;
    } else {
      ++i;
      continue;
    }
    for (std::size_t k = begin; k < i && k < text.size(); ++k)
      if (text[k] != '\n') out.code[k] = ' ';
  }
  return out;
}

std::vector<std::string> literals_of(const std::string& text) { return split_source(text).literals; }

// ---- TRY among initializers

// Returns whether the brace at `at` begins a list of initializers, and not a block or a type's members.
bool begins_initializers(const std::string& code, std::size_t at) {
  const std::size_t end = code.find_last_not_of(" \n", at == 0 ? 0 : at - 1);
  if (end == std::string::npos || std::string_view(";)}{:]").find(code[end]) != std::string_view::npos) return false;
  const std::size_t before = code.find_last_of(";{}", end);
  const std::string header = code.substr(before == std::string::npos ? 0 : before + 1, end - before);
  for (const std::string word : {"else", "do", "try", "const", "noexcept", "override", "mutable"})
    if (header.ends_with(word)) return false;
  if (header.rfind("->") != std::string::npos && header.rfind("->") > header.rfind(')')) return false;
  if (header.find_first_of("()=") != std::string::npos) return true;
  for (const std::string word : {"namespace ", "struct ", "class ", "union ", "enum "})
    if (header.find(word) != std::string::npos) return false;
  return !header.ends_with("namespace");
}

// Returns the lines on which a TRY follows another initializer in the same list of braces, or in a lambda's captures.
// If it returns early, neither gcc nor clang destroys what was initialized before it.
std::vector<std::size_t> late_tries(const std::string& code) {
  std::vector<std::size_t> out;
  for (std::size_t at = 0; (at = code.find("TRY(", at)) != std::string::npos; ++at) {
    int depth = 0;
    bool is_late = false, has_comma = false;
    for (std::size_t i = at; i-- > 0 && !is_late;) {
      const char c = code[i];
      if (c == ')' || c == ']' || c == '}') ++depth;
      if (depth == 0 && c == ';') break;  // a block
      if (depth == 0 && c == ',') has_comma = true;
      if (c != '(' && c != '[' && c != '{') continue;
      if (depth-- > 0) continue;
      depth = 0;
      if (c == '{' && !begins_initializers(code, i)) break;
      is_late = has_comma && c != '(';
      if (c == '(') has_comma = false;  // arguments are destroyed
    }
    if (is_late)
      out.push_back(
          1 + static_cast<std::size_t>(std::count(code.begin(), code.begin() + static_cast<std::ptrdiff_t>(at), '\n')));
  }
  return out;
}

TEST(Architecture, NoTryFollowsAnotherInitializer) {
  int seen = 0;
  for (const SourceFile& file : sources()) {
    const std::string code = split_source(file.text).code;
    seen += code.find("TRY(") != std::string::npos;
    if (file.path == "lib/base/result.h") continue;
    for (const std::size_t line : late_tries(code))
      ADD_FAILURE() << file.path << ":" << line << ": what is initialized before this TRY leaks if it returns; "
                    << "compute its value in a statement of its own";
  }
  EXPECT_GT(seen, 100);
}

TEST(Architecture, ATryAfterAnInitializerIsFound) {
  const auto is_found = [](const std::string& code) { return !late_tries(split_source(code).code).empty(); };
  EXPECT_TRUE(is_found("void f() { A a{text, TRY(g())}; }"));
  EXPECT_TRUE(is_found("void f() {\n  list.push_back({name,\n                  {1, TRY(g())}});\n}"));
  EXPECT_TRUE(is_found("void f() { return A{.s = text, .i = TRY(g())}; }"));
  EXPECT_TRUE(is_found("void f() { A a = {text, h(1, TRY(g()))}; }"));
  EXPECT_TRUE(is_found("void f() { h([s = text, i = TRY(g())] {}); }"));
  EXPECT_FALSE(is_found("void f() { A a{TRY(g()), text}; }"));
  EXPECT_FALSE(is_found("void f() { h(text, TRY(g())); }"));
  EXPECT_FALSE(is_found("void f() { h(text, [&]() -> Status { return TRY(g()); }); }"));
  EXPECT_FALSE(is_found("void f() { if (a) { const int b = 1, c = TRY(g()); } }"));
  EXPECT_FALSE(is_found("struct A : B { void f() { TRY(g(1, 2)); } };"));
  EXPECT_FALSE(is_found("void f() { A a{text, 1};  // , TRY(g())\n}"));
  EXPECT_FALSE(is_found("void f() { A a{text, \"TRY(\"}; }"));
}

// Names of formats and of their files, whole or in part.
const std::vector<std::string>& marks_of_formats() {
  static const std::vector<std::string> kMarks = {
      ".safetensors",    ".distcp",         ".metadata",     ".bin",
      ".index.json",     "pytorch_model",   "modeling",      "running_states",
      "tmp_index_files", "reshard_layout.", "__R_K",         ".pth",
      "consolidated",    "mp_rank_",        "_model_states", "zero_pp_rank",
      "global_step",     "distrib_optim",   "common.pt",     ".h5"};
  return kMarks;
}

// Returns whether a literal shows a whole command, in which a format's name is only an example.
bool shows_a_command(const std::string& literal) {
  for (const char* const command : {"convert", "plan", "merge", "synth", "patch", "watch"})
    if (literal.find("reshard " + std::string(command) + " ") != std::string::npos) return true;
  return false;
}

// Returns whether a literal gives an option exactly this value: "--to hf".
bool has_option(const std::string& literal, const std::string& option, std::string_view word) {
  const std::string text = option + " " + std::string(word);
  for (std::size_t at = literal.find(text); at != std::string::npos; at = literal.find(text, at + 1)) {
    const char next = at + text.size() < literal.size() ? literal[at + text.size()] : ' ';
    if (!std::isalnum(static_cast<unsigned char>(next)) && next != '-' && next != '_') return true;
  }
  return false;
}

// Returns whether a word has another meaning in this file.
bool means_something_else(const std::string& path, const std::string& word) {
  static const std::map<std::string, std::vector<std::string>> kMeanings = {
      {"hf", {"lib/model/", "tools/synth.cc"}},                // a naming convention
      {"colossalai", {"lib/model/", "lib/layout/stages.cc"}},  // likewise, and a rule of pipeline stages
      {"vllm", {"lib/layout/stages.cc"}},                      // a rule of pipeline stages
      {"nanotron", {"lib/model/"}},                            // a naming convention
      {"megatron", {"lib/model/"}},                            // likewise
      {"gguf", {"lib/model/"}},                                // likewise
      {"meta", {"lib/model/packed_layouts.cc"}},               // a tensor of compressed-tensors' marlin-24
      {"bin", {"tools/job_options.cc"}},                       // a container, of --shard-format
      {"ranks", {"tools/", "lib/audit/"}},                     // a member of JSON objects, a row of a table
      // A file that the user names, in an example.
      {".h5", {"tools/convert.cc", "tools/delta.cc"}},
      {"--to hf", {"lib/convert/weights/requantization.cc"}},  // the names that a refusal asks for
  };
  const auto meanings = kMeanings.find(word);
  return meanings != kMeanings.end() && std::any_of(meanings->second.begin(), meanings->second.end(),
                                                    [&](const std::string& p) { return path.starts_with(p); });
}

TEST(Architecture, OnlyFormatsKnowFormats) {
  std::size_t seen = 0;
  for (const SourceFile& file : files_under({"lib", "tools"}, {".h", ".cc", ".cu", ".cuh"}))
    for (const std::string& literal : literals_of(file.text)) {
      ++seen;
      for (const Format* f : formats())
        EXPECT_FALSE(literal == f->name && !means_something_else(file.path, literal))
            << file.path << ": \"" << literal << "\" is a format's name: ask the row of the table";
      for (const Format* f : formats())
        EXPECT_FALSE(has_option(literal, "--to", f->name) && !shows_a_command(literal) &&
                     !means_something_else(file.path, "--to " + std::string(f->name)))
            << file.path << ": \"" << literal << "\" speaks of --to " << f->name << ": ask the rows of the table";
      for (const std::string& mark : marks_of_formats())
        EXPECT_TRUE(literal.find(mark) == std::string::npos || means_something_else(file.path, mark))
            << file.path << ": \"" << literal << "\" has '" << mark << "', which is for a format to know";
    }
  EXPECT_GT(seen, 3000U);
  EXPECT_EQ(literals_of("a(\"x\\\"y\"); // \"no\"\n'\"' R\"t(raw\")t\" 1'000 \"z\""),
            (std::vector<std::string>{"x\\\"y", "raw\")t\"", "z"}));
  EXPECT_TRUE(has_option("for --to hf, as", "--to", "hf"));
  EXPECT_FALSE(has_option("for --to hf-too", "--to", "hf"));
}

// Adding a format is one directory and one row.
TEST(Architecture, AFormatTakesFewLines) {
  std::ptrdiff_t lines = 0;
  for (const SourceFile& file : files_under({"tests/formats/toy"}, {"toy.h", "toy.cc", "program.cc"}))
    lines += std::count(file.text.begin(), file.text.end(), '\n');
  EXPECT_GT(lines, 0);
  EXPECT_LT(lines, 150);
  for (const SourceFile& file : sources())  // all formats have the same files, named like their --to
    if (file.path.ends_with("/reader.cc") || file.path.ends_with("/target.cc")) {
      const std::string room = file.path.substr(0, file.path.rfind('/'));
      if (room == "formats/tensor_files") continue;
      const std::string name = room.substr(room.find('/') + 1);
      EXPECT_TRUE(std::any_of(formats().begin(), formats().end(), [&](const Format* f) { return f->name == name; }))
          << file.path;
      EXPECT_TRUE(fs::exists(fs::path(RESHARD_SOURCE_DIR) / room / (name + ".cc"))) << room << ": no row";
    }
}

// The checkout is self-contained: nothing in it names a path outside of it.
TEST(Architecture, NothingNamesAPlaceOutsideTheCheckout) {
  const std::vector<std::string> places = {std::string("/wo") + "rk/", std::string("../sha") + "red"};
  const std::vector<std::string> endings = {".h",  ".cc",   ".cu",   ".cuh", ".txt", ".cmake", ".md", ".py",
                                            ".sh", ".json", ".yaml", ".yml", ".in",  ".toml",  "run"};
  std::vector<SourceFile> all =
      files_under({"lib", "formats", "tools", "tests", "samples", "docs", ".ci", ".github"}, endings);
  for (const char* name : {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CMakeLists.txt",
                           "CMakePresets.json", ".clang-tidy"}) {
    std::ostringstream text;
    text << std::ifstream(fs::path(RESHARD_SOURCE_DIR) / name).rdbuf();
    all.push_back({name, text.str()});
  }
  for (const SourceFile& file : all)
    for (const std::string& place : places)
      EXPECT_EQ(file.text.find(place), std::string::npos) << file.path << " names " << place;
}

// Returns the names of the C library's and the standard library's file operations that a text calls.
std::set<std::string> file_operations_in(const std::string& text) {
  static const std::set<std::string> kCalls = {"access",
                                               "chmod",
                                               "chown",
                                               "close",
                                               "copy_file_range",
                                               "creat",
                                               "faccessat",
                                               "fallocate",
                                               "fchmod",
                                               "fchown",
                                               "fdatasync",
                                               "flock",
                                               "fopen",
                                               "fstat",
                                               "fstatat",
                                               "fsync",
                                               "ftruncate",
                                               "futimens",
                                               "link",
                                               "linkat",
                                               "lseek",
                                               "lstat",
                                               "mkdir",
                                               "mkdirat",
                                               "mkdtemp",
                                               "mkostemp",
                                               "mkstemp",
                                               "nftw",
                                               "open",
                                               "openat",
                                               "opendir",
                                               "posix_fallocate",
                                               "pread",
                                               "preadv",
                                               "pwrite",
                                               "pwritev",
                                               "read",
                                               "readdir",
                                               "readlink",
                                               "readv",
                                               "realpath",
                                               "remove",
                                               "rename",
                                               "renameat",
                                               "renameat2",
                                               "rmdir",
                                               "scandir",
                                               "sendfile",
                                               "stat",
                                               "statx",
                                               "symlink",
                                               "sync_file_range",
                                               "syncfs",
                                               "truncate",
                                               "unlink",
                                               "unlinkat",
                                               "utimensat",
                                               "write",
                                               "writev"};
  static const std::set<std::string> kOfStd = {"fopen", "fstream", "ifstream", "ofstream", "remove", "rename"};
  static const std::set<std::string> kLexical = {"absolute", "path"};  // of std::filesystem: they change nothing
  const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  std::set<std::string> out;
  for (std::size_t at = 0; (at = text.find("::", at)) != std::string::npos;) {
    std::size_t begin = at, end = at + 2;
    while (begin > 0 && is_word(text[begin - 1])) --begin;
    while (end < text.size() && is_word(text[end])) ++end;
    const std::string scope = text.substr(begin, at - begin), name = text.substr(at + 2, end - at - 2);
    const bool is_nested = at > 0 && text[at - 1] == '>';
    at += 2;
    const bool is_call = scope.empty() && !is_nested && end < text.size() && text[end] == '(' && kCalls.contains(name);
    if (is_call || (scope == "std" && kOfStd.contains(name)) || (scope == "filesystem" && !kLexical.contains(name)))
      out.insert(name);
  }
  return out;
}

// File operations go through the table of lib/base/syscalls.h, so that tests can make each of them fail. Exceptions are
// devices, pipes, a signal handler, and files of the kernel.
TEST(Architecture, FileOperationsGoThroughTheTable) {
  const std::map<std::string, std::set<std::string>> exceptions = {
      {"lib/base/directory_events.cc", {"close", "read"}},
      {"lib/base/memory_limit.cc", {"fopen"}},
      {"tools/doctor.cc", {"access", "close", "open"}},
      {"tools/family.cc", {"mkdtemp"}},
      {"tools/fuse.cc", {"close", "ofstream", "open", "write"}},
      {"tools/mount.cc", {"close", "open", "read", "write"}},
      {"tools/reshard.cc", {"open"}},
      {"tools/terminal.cc", {"ifstream", "write"}}};
  EXPECT_EQ(file_operations_in("if (::stat(a, &s) != 0 || std::filesystem::exists(b)) std::ifstream(c);"),
            (std::set<std::string>{"exists", "ifstream", "stat"}));
  EXPECT_EQ(file_operations_in("Status File::close() { Journal::open(at); other->link(a); sys().open(a); }"),
            std::set<std::string>());
  for (const SourceFile& file : sources()) {
    if (file.path == "lib/base/syscalls.cc") continue;
    const auto row = exceptions.find(file.path);
    for (const std::string& name : file_operations_in(file.text))
      if (row == exceptions.end() || !row->second.contains(name))
        ADD_FAILURE() << file.path << ": " << name << "() goes through sys()";
  }
}

// Messages count things with count_of or bytes_of, which know the singular; otherwise they would say "1 tensors".
TEST(Architecture, CountsAgreeWithTheirNouns) {
  const std::vector<std::string> nouns = {
      "tensors", "moves",    "files",    "bytes",  "elements", "rows",    "columns", "layers",    "objects", "ranks",
      "pieces",  "findings", "values",   "heads",  "experts",  "shards",  "stages",  "names",     "groups",  "checks",
      "sources", "threads",  "machines", "blocks", "steps",    "digests", "words",   "dimensions"};
  for (const SourceFile& file : sources())
    for (const std::string_view call : {"with_commas(", "std::to_string("})
      for (std::size_t at = 0; (at = file.text.find(call, at)) != std::string::npos;) {
        const std::size_t begin = at += call.size();
        for (int depth = 1; depth > 0 && at < file.text.size(); ++at)
          depth += file.text[at] == '(' ? 1 : file.text[at] == ')' ? -1 : 0;
        if (file.text.substr(begin, at - begin).find("kMax") != std::string::npos) continue;  // never 1
        std::string after = file.text.substr(at, 80);
        std::erase_if(after, [](char c) { return c == ' ' || c == '\n' || c == '+'; });
        for (const std::string& noun : nouns)
          if (after.starts_with("\"" + noun))
            ADD_FAILURE() << file.path << ": count_of or bytes_of counts " << noun << ": "
                          << file.text.substr(begin, at - begin);
      }
}

}  // namespace
}  // namespace reshard::architecture_test
