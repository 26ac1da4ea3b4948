// Tests HTML reports (--html): they contain the content of --json and every box, run only their own script, and stay
// small. tests/interop/test_html.py opens them in a browser.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <span>
#include <tuple>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/sha256.h"
#include "tests/support/temp_dir.h"

namespace reshard::html_test {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr std::string_view kDataBegins = "<script type=\"application/json\" id=\"data\">";

std::string between(const std::string& text, std::string_view begin, std::string_view end) {
  const std::size_t from = text.find(begin) + begin.size();
  return text.substr(from, text.find(end, from) - from);
}

// Returns the page that a command with these arguments writes.
std::string page_of(std::vector<std::string> args, int exit_code = 0) {
  const TempDir dir;
  args.insert(args.end(), {"--html", dir / "page.html"});
  const CommandResult r = reshard_cli(args);
  EXPECT_EQ(r.exit_code, exit_code) << r.err;
  return read_file(dir / "page.html");
}

Json data_of(const std::string& page) { return *parse_json(between(page, kDataBegins, "</script>"), "page"); }

Json json_of(std::vector<std::string> args) {
  args.emplace_back("--json");
  return *parse_json(reshard_cli(args).out, "out");
}

Index count(const std::string& text, std::string_view what) {
  Index n = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

// Returns the items of a list by value, so that a loop over them needs no Result that outlives it.
std::span<const Json> items(const Json& list) { return *list.as_array(); }
std::span<const Json> items(const Json& object, std::string_view key) { return *object.get_array(key); }

std::vector<Index> numbers(const Json& list) {
  std::vector<Index> out;
  for (const Json& n : items(list)) out.push_back(*n.as_index());
  return out;
}

// Expands runs of first, step and count.
std::vector<Index> expanded(const Json& list) {
  const std::vector<Index> runs = numbers(list);
  std::vector<Index> out;
  for (std::size_t i = 0; i < runs.size(); i += 3)
    for (Index k = 0; k < runs[i + 2]; ++k) out.push_back(runs[i] + k * runs[i + 1]);
  return out;
}

// A box: its origin and shape, its file, and whether it is a further copy.
using StoredBox = std::tuple<std::vector<Index>, std::vector<Index>, std::string, bool>;
using StoredBoxes = std::map<std::string, std::vector<StoredBox>>;

StoredBoxes boxes_of_json(const Json& json) {
  StoredBoxes out;
  for (const Json& t : items(json, "tensors"))
    for (const Json& s : items(t, "shards"))
      out[std::string(*t.get_string("name"))].emplace_back(numbers(*s.find("origin")), numbers(*s.find("shape")),
                                                           *s.get_string("file"), *s.get_bool("copy"));
  return out;
}

StoredBoxes boxes_of_page(const Json& data) {
  StoredBoxes out;
  const auto files = items(*data.find("files"), "list");
  for (const Json& row : items(data, "tensors")) {
    const auto cells = items(row);
    const Json& layout = items(data, "layouts")[static_cast<std::size_t>(*cells[2].as_index())];
    for (const bool copy : {false, true}) {
      const Json& list = items(data, "lists")[static_cast<std::size_t>(*cells[copy ? 4 : 3].as_index())];
      std::vector<std::vector<Index>> columns;
      for (const Json& c : items(layout, copy ? "copies" : "boxes")) columns.push_back(expanded(c));
      const std::vector<Index> places = expanded(list);
      for (std::size_t k = 0; k < places.size(); ++k) {
        std::vector<Index> corner, shape;
        for (std::size_t c = 0; c < columns.size(); ++c)
          (c < columns.size() / 2 ? corner : shape).push_back(columns[c].at(k));
        const auto file = items(files[static_cast<std::size_t>(places[k])]);
        out[std::string(*cells[0].as_string())].emplace_back(corner, shape, *file[0].as_string(), copy);
      }
    }
  }
  return out;
}

class PageOf : public testing::TestWithParam<const char*> {};

TEST_P(PageOf, HoldsEveryBoxOfEveryTensor) {
  const std::string path = sample(GetParam()) + "/checkpoint";
  const Json page = data_of(page_of({"inspect", path}));
  EXPECT_EQ(*page.get_string("command"), "inspect");
  const Json& data = *page.find("data");
  const StoredBoxes boxes = boxes_of_page(data);
  EXPECT_EQ(boxes, boxes_of_json(json_of({"inspect", path, "--shards"})));
  EXPECT_GT(boxes.size(), 20u);
}
INSTANTIATE_TEST_SUITE_P(Cli, PageOf, testing::Values("fsdp2_tp2_optim", "hsdp2x4", "per_rank_tp2", "pp2_tp4"));

TEST(Html, IsOneFileThatLetsItsOwnStyleAndScriptIn) {
  const std::string page = page_of({"inspect", sample("tp8") + "/checkpoint"});
  const auto hash = [](const std::string& text) {
    const std::string hex = sha256_hex(text) + "00",
                      digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (std::size_t i = 0; i < 66; i += 3) {
      const std::size_t bits = std::stoul(hex.substr(i, 3), nullptr, 16);
      out += {digits[bits >> 6], digits[bits & 63]};
    }
    out.back() = '=';
    return "'sha256-" + out + "'";
  };
  EXPECT_EQ(between(page, "http-equiv=\"Content-Security-Policy\" content=\"", "\""),
            "default-src 'none'; style-src " + hash(between(page, "<style>", "</style>")) + "; script-src " +
                hash(between(page, "<script>", "</script>")) + "; base-uri 'none'; form-action 'none'");
  for (const char* outward : {"http:", "https:", " src=", " href=", "@import", "url("})
    EXPECT_THAT(page, Not(HasSubstr(outward)));
}

TEST(Html, NamesAreDataWhateverTheyHold) {
  const std::vector<std::string> names = {"</script><script>document.title='ran'</script>",
                                          "<img src=x onerror=alert(1)>",
                                          "a&lt;b",
                                          "<!--<script>",
                                          "{{data}}",
                                          "line\xe2\x80\xa8"
                                          "end\xe2\x80\xa9",
                                          "tab\t\"quoted\""};
  Json header = Json::object();
  Index at = 0;
  for (const std::string& name : names) {
    Json offsets = Json::array(), shape = Json::array();
    offsets.push_back(at);
    offsets.push_back(at += 4);
    shape.push_back(1);
    header.set(
        name,
        Json::object().set("dtype", "F32").set("shape", std::move(shape)).set("data_offsets", std::move(offsets)));
  }
  const std::string text = to_text(header);
  std::string file = {static_cast<char>(text.size() & 255), static_cast<char>(text.size() >> 8)};
  file += std::string(6, '\0') + text + std::string(static_cast<std::size_t>(at), '\0');
  const TempDir dir;
  const std::string page = page_of({"inspect", dir.write("model.safetensors", file)});
  EXPECT_EQ(count(page, "<script"), 2);
  EXPECT_EQ(count(page, "</script"), 2);
  const std::string json = between(page, kDataBegins, "</script>");
  EXPECT_EQ(json.find_first_of("<>&"), std::string::npos);
  EXPECT_THAT(json, Not(HasSubstr("\xe2\x80\xa8")));
  const Json page_data = data_of(page);
  std::vector<std::string> shown;
  for (const Json& row : items(*page_data.find("data"), "tensors")) shown.emplace_back(*items(row)[0].as_string());
  EXPECT_THAT(shown, testing::UnorderedElementsAreArray(names));
}

TEST(Html, TensorsThatAreCutAlikeTakeFewBytes) {
  const TempDir dir;
  ASSERT_EQ(
      reshard_cli({"synth", dir / "big", "--model", "llama3-8b", "--mesh", "dp_shard=8,tp=2", "--metadata-only", "-q"})
          .exit_code,
      0);
  const std::string page = page_of({"inspect", dir / "big"});
  Index boxes = 0;
  for (const auto& [name, list] : boxes_of_page(*data_of(page).find("data"))) boxes += std::ssize(list);
  EXPECT_GT(boxes, 4000);
  EXPECT_LT(between(page, kDataBegins, "</script>").size(), 40'000u);
  EXPECT_LT(page.size(), 120'000u);
}

// Removes values that differ between two runs.
TEST(Html, HoldsWhatJsonSays) {
  const std::string path = sample("fsdp2_tp2_optim") + "/checkpoint", other = sample("fsdp8") + "/checkpoint";
  const std::vector<std::vector<std::string>> commands = {
      {"inspect", path},
      {"verify", path, "--values"},
      {"diff", path, other},
      {"check", "--config", sample("tp8") + "/config.json", "--mesh", "tp=3"},
      {"plan", path, "--to", "dcp", "--mesh", "tp=4"}};
  for (const std::vector<std::string>& command : commands) {
    SCOPED_TRACE(command[0]);
    std::vector<std::string> with_json = command;
    with_json.emplace_back("--json");
    const CommandResult printed = reshard_cli(with_json);
    const Json json = *parse_json(printed.out, "out");
    const Json page = data_of(page_of(command, printed.exit_code));
    EXPECT_EQ(*page.get_string("command"), command[0]);
    const Json& data = *page.find("data");
    const auto members = *json.as_object();
    for (const Json::Member& member : members) {
      if (member.key == "seconds" || member.key == "disk_free" || member.key == "peak_memory") continue;
      if (command[0] == "inspect" && (member.key == "tensors" || member.key == "files")) continue;
      ASSERT_TRUE(data.contains(member.key)) << member.key;
      EXPECT_EQ(to_text(*data.find(member.key)), to_text(member.value)) << member.key;
    }
  }
}

// Three steps of a model of two layers: the first moves by half, then not at all; the second moves by a thousandth,
// then becomes infinite. The head moves from zero. The optimizer is of no layer.
TEST(Html, ADiffOfSeveralStepsDrawsALineForEachLayer) {
  const TempDir dir;
  const std::vector<std::vector<float>> steps = {{3, 4, 1000, 0, 1}, {3, 6.5F, 1001, 1, 2}, {3, 6.5F, INFINITY, 1, 3}};
  std::vector<std::string> command = {"diff"};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::vector<float>& v = steps[i];
    TensorValues values;
    const auto set = [&](const std::string& name, float value) {
      values[name] = {DType::kFloat32, {1}, std::string(reinterpret_cast<const char*>(&value), sizeof value)};
    };
    set("model.layers.0.a", v[0]), set("model.layers.0.b", v[1]), set("model.layers.10.a", v[2]);
    set("lm_head.weight", v[3]), set("optimizer.state.model.layers.0.a.exp_avg", v[4]);
    command.push_back(dir / ("step-" + std::to_string(i + 1)));
    write_dcp(values, command.back(), Mesh({{"dp_shard", 1}}));
  }
  const std::string page = page_of(command, 1);
  EXPECT_THAT(page, HasSubstr("Different: 2 of 2 steps changed something"));
  const auto row = [](const std::string& layer, const std::string& first, const std::string& second) {
    const auto cell = [](const std::string& text) {
      const std::string value = text == "not finite" ? "Infinity" : text;
      return "<td class=\"number\" data-value=\"" + value + "\">" + text + "</td>";
    };
    return "<code>" + layer + "</code></span></td>" + cell(first) + cell(second) + "</tr>";
  };
  const std::string plain = between(page, "<main>", kDataBegins);
  EXPECT_THAT(plain, HasSubstr(row("model.layers.0", "0.5", "0")));
  EXPECT_THAT(plain, HasSubstr(row("model.layers.10", "0.001", "not finite")));
  EXPECT_THAT(plain, HasSubstr(row("lm_head", "not finite", "0")));
  EXPECT_EQ(count(plain, "<path class=\"line\""), 3);
  EXPECT_THAT(plain, HasSubstr("Logarithmic scale"));
  const Json json = json_of(command), page_json = data_of(page);
  EXPECT_EQ(*json.get_string("schema"), "reshard.diffs/1");
  EXPECT_EQ(to_text(*page_json.find("data")), to_text(json));
  command.pop_back();
  EXPECT_EQ(to_text(items(json, "steps")[0]), to_text(json_of(command)));
  EXPECT_EQ(reshard_cli({"diff", command[1], command[1], command[1], "-q"}).exit_code, 0);
}

TEST(Html, APlanSaysWhichFilesAreReadForWhich) {
  const std::string path = sample("fsdp2_tp2_optim") + "/checkpoint";
  const Json page = data_of(page_of({"plan", path, "--to", "hf"}));
  const Json& data = *page.find("data");
  Index bytes = 0, moves = 0, read = 0;
  for (const Json& flow : items(data, "flows")) bytes += numbers(flow)[2], moves += numbers(flow)[3];
  for (const Json& source : items(data, "sources")) read += *source.get_index("bytes");
  EXPECT_EQ(bytes, *data.get_index("bytes_read"));
  EXPECT_EQ(read, bytes);
  EXPECT_EQ(moves, *data.get_index("moves"));
  EXPECT_EQ(items(data, "sources").size(), 4u);
  EXPECT_EQ(*items(data, "targets")[0].get_string("first"), "model.safetensors");
}

TEST(Html, RowsOfAVocabularyAreCounted) {
  const TempDir dir;
  ASSERT_EQ(
      reshard_cli({"synth", dir / "bad", "--model", "llama3-70b", "--layers", "1", "--to", "hf", "--headers-only",
                   "--shape", "model.embed_tokens.weight=16064x8192", "--shape", "lm_head.weight=16064x8192", "-q"})
          .exit_code,
      0);
  const Json page = data_of(page_of({"verify", dir / "bad", "--config", dir / "bad/config.json"}, 1));
  EXPECT_EQ(to_text(*items(*page.find("data"), "findings")[0].find("rows")),
            R"([{"what":"stored","rows":16064},{"what":"lost","rows":112192},{"what":"padding","rows":256}])");
}

// The part of the page in front of its data, which is read without scripts.
std::string plain_part(const std::string& page) { return between(page, "<main>", kDataBegins); }

TEST(Html, IsReadWithoutScripts) {
  const std::string path = sample("tp8") + "/checkpoint";
  const std::vector<std::string> command = {"verify", path, "--values", "--sha256", "--fail-on", "note"};
  const std::string page = plain_part(page_of(command));
  const Json json = json_of(command);
  EXPECT_THAT(page, HasSubstr("Passed: 0 errors, 0 warnings, 0 notes"));
  EXPECT_THAT(page, HasSubstr("reshard verify " + path + " --values --sha256 --fail-on note --html "));
  for (const Json& tensor : items(json, "tensors")) {
    EXPECT_THAT(page, HasSubstr(">" + std::string(*tensor.get_string("name")) + "</a>"));
    EXPECT_THAT(page, HasSubstr(*tensor.get_string("digest")));
  }
  for (const Json& check : items(json, "checks"))
    EXPECT_EQ(count(page, "<td class=\"text\">" + std::string(*check.get_string("title")) + "</td>"), 1);
  ASSERT_EQ(items(json, "files").size(), 10u);
  EXPECT_EQ(*items(json, "files")[0].get_string("path"), "../config.json");
  for (const Json& file : items(json, "files")) {
    const std::string name(*file.get_string("path"));
    EXPECT_EQ(*file.get_string("sha256"), sha256_hex(read_file(path + "/" + name)));
    EXPECT_THAT(page, HasSubstr(std::string(*file.get_string("sha256")) + "  " + name + "\n"));
  }
}

TEST(Html, NamesInItsPlainPartAreText) {
  const TempDir dir;
  const std::vector<std::string> names = {"a</main><script>x", "<img src=x>", "q\"onclick=x", "a&lt;b",
                                          "{{data}}",          "{{body}}"};
  std::string header = "{", separator;
  for (std::size_t i = 0; i < names.size(); ++i) {
    header += separator + to_text(Json(names[i])) + R"(:{"dtype":"F32","shape":[1],"data_offsets":[)" +
              std::to_string(4 * i) + "," + std::to_string(4 * i + 4) + "]}";
    separator = ",";
  }
  header += "}";
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i));
  ASSERT_TRUE(replace_file(dir / "x.safetensors", file + header + std::string(4 * names.size(), '\0')));
  for (const std::string command : {"inspect", "verify"}) {
    const std::string page = plain_part(page_of({command, dir / "x.safetensors"}, 0));
    EXPECT_EQ(count(page, "<script"), 0) << command;
    EXPECT_EQ(count(page, "</main>"), 1);
    EXPECT_THAT(page, Not(HasSubstr("<img")));
    EXPECT_THAT(page, HasSubstr("&lt;img src=x&gt;"));
    EXPECT_THAT(page, HasSubstr("q&quot;onclick=x"));
    EXPECT_THAT(page, HasSubstr("a&amp;lt;b"));
    EXPECT_EQ(*data_of(page_of({command, dir / "x.safetensors"}, 0)).get_string("command"), command);
  }
}

// Of all lengths around the ends of blocks, in parts of all lengths.
TEST(Sha256, OfPartsIsThatOfTheWhole) {
  for (const std::size_t size : {0, 1, 55, 56, 63, 64, 65, 127, 128, 1000}) {
    std::string message(size, 'x');
    for (std::size_t i = 0; i < size; ++i) message[i] = static_cast<char>(i * 7);
    for (const std::size_t part : {1, 3, 63, 64, 65, 200}) {
      Sha256 sum;
      for (std::size_t at = 0; at < size; at += part) sum.add(std::string_view(message).substr(at, part));
      EXPECT_EQ(to_hex(sum.digest()), sha256_hex(message)) << size << " in parts of " << part;
    }
  }
}

TEST(Html, SaysWhereItCannotBeWritten) {
  const CommandResult r = reshard_cli({"inspect", sample("tp8") + "/checkpoint", "--html", "/nowhere/page.html"});
  EXPECT_EQ(r.exit_code, 5);
  EXPECT_THAT(r.err, HasSubstr("/nowhere/page.html"));
}

}  // namespace
}  // namespace reshard::html_test
