// SPDX-License-Identifier: Apache-2.0
#include "tools/html_report.h"

#include <array>
#include <ctime>

#include "lib/base/file.h"
#include "lib/base/machine.h"
#include "lib/base/printable.h"
#include "lib/base/text.h"
#include "tools/host.h"
#include "tools/job.h"
#include "tools/markup.h"
#include "tools/report_sections.h"

namespace reshard::tools {
namespace {

// Returns JSON that can stand inside a <script>: "<", ">" and "&" occur only in its strings.
std::string escaped(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  for (const char c : json) {
    if (c == '<')
      out += "\\u003c";
    else if (c == '>')
      out += "\\u003e";
    else if (c == '&')
      out += "\\u0026";
    else
      out += c;
  }
  return out;
}

std::string time_text(std::time_t seconds) { return utc_text(seconds, "%Y-%m-%d %H:%M:%S UTC"); }

// Returns the head of the page: its inputs, the verdict, and how, when and where it was made.
std::string header_html(std::string_view command, const std::vector<InputFacts>& inputs, const Verdict& verdict) {
  std::vector<std::string> paths;
  std::vector<std::pair<std::string, std::string>> facts;
  for (const InputFacts& input : inputs) {
    paths.push_back(input.path);
    std::string files = count_of(input.files, "file") + ", " + human_bytes(input.bytes);
    if (input.newest_ns > 0)
      files += ", last changed " + time_text(static_cast<std::time_t>(input.newest_ns / 1'000'000'000));
    facts.emplace_back(input.path, files);
  }
  facts.emplace_back("report made", time_text(std::time(nullptr)));
  facts.emplace_back("on host", host_name());
  facts.emplace_back("by", std::string("reshard ") + RESHARD_VERSION);
  facts.emplace_back("command", command_text());
  static constexpr std::array kClasses = {"good", "bad", "neutral"};
  const std::string title = markup_escaped(join(paths, " \u2192 "));
  return "<header><h1><small>reshard " + std::string(command) + "</small> " + title + "</h1>\n<p class=\"verdict " +
         kClasses[static_cast<std::size_t>(verdict.kind)] + "\">" + markup_escaped(verdict.text) + "</p></header>\n" +
         html_facts(facts);
}

}  // namespace

void add_html_option(CommandLine& line, std::string& path) {
  line.add_option("--html", path, "Write a self-contained HTML report to FILE").common().written(kHtmlReport);
}

std::string html_page(std::string_view command, const std::vector<InputFacts>& inputs, Json data) {
  std::string body = header_html(command, inputs, verdict_of(command, data));
  body += report_sections(command, data);
  const Json page = Json::object().set("command", command).set("version", RESHARD_VERSION).set("data", std::move(data));
  const std::string_view viewer = report_viewer();
  const std::size_t body_mark = viewer.find(kBodyMark), data_mark = viewer.find(kDataMark);
  std::string out(viewer.substr(0, body_mark));
  out += body;
  out += viewer.substr(body_mark + kBodyMark.size(), data_mark - body_mark - kBodyMark.size());
  out += escaped(printable_json(to_text(page)));
  return out += viewer.substr(data_mark + kDataMark.size());
}

Status write_html(const std::string& path, std::string_view command, const std::vector<InputFacts>& inputs, Json data) {
  if (!leads()) return {};
  return replace_report(path, kHtmlReport, html_page(command, inputs, std::move(data)));
}

}  // namespace reshard::tools
