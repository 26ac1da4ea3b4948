// SPDX-License-Identifier: Apache-2.0
#include "tools/findings_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/html_report.h"
#include "tools/job.h"
#include "tools/markup.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

constexpr std::size_t kSeverityWidth = 10;  // columns of the label and the space behind it, as print_row has them
constexpr std::array kSeverities = {Severity::kError, Severity::kWarning, Severity::kNote};

// ---- words

Index count_of_severity(const std::vector<Finding>& findings, Severity severity) {
  return std::count_if(findings.begin(), findings.end(), [&](const Finding& f) { return f.severity == severity; });
}

// "1 error, 0 warnings, 1 note"
std::string counts_text(const std::vector<Finding>& findings) {
  std::vector<std::string> parts;
  for (const Severity s : kSeverities) parts.push_back(count_of(count_of_severity(findings, s), severity_name(s)));
  return join(parts, ", ");
}

std::string elapsed_text(double seconds) {
  if (seconds >= 1) return human_seconds(seconds);
  return std::to_string(std::max(1L, std::lround(seconds * 1000))) + " ms";
}

const char* color_of(Severity severity) {
  switch (severity) {
    case Severity::kError:
      return "1;31";
    case Severity::kWarning:
      return "33";
    case Severity::kNote:
      break;
  }
  return "36";
}

// Returns the first line of a finding.
std::string headline(const Finding& finding) {
  return (finding.tensors.empty() ? "" : folded(finding.tensors) + ": ") + printable(finding.what);
}

// Returns the other lines: evidence, loss, advice.
std::vector<std::string> details(const Finding& finding) {
  std::vector<std::string> out;
  for (const std::string& line : finding.why) out.push_back(printable(line));
  for (const std::string& text : {finding.lost, finding.advice})
    if (!text.empty()) out.push_back(printable(text));
  return out;
}

std::vector<Finding> errors_first(std::vector<Finding> findings) {
  sort_by_severity(findings);
  return findings;
}

bool fails(const Finding& finding, Severity threshold) { return finding.severity >= threshold; }

int exit_code(const std::vector<Finding>& findings, Severity threshold) {
  return std::any_of(findings.begin(), findings.end(), [&](const Finding& f) { return fails(f, threshold); }) ? 1 : 0;
}

// ---- checks and the findings that belong to them

// A check and its findings.
struct Case {
  CheckRun check;
  std::vector<const Finding*> findings;
};

std::vector<Case> cases_of(const AuditReport& report) {
  std::vector<Case> cases;
  for (const CheckRun& check : report.checks) cases.push_back({check, {}});
  for (const Finding& finding : report.findings) {
    const CheckRun* check = check_of(finding, report.checks);
    const std::string& id = check ? check->id : finding.id;
    auto found = std::find_if(cases.begin(), cases.end(), [&](const Case& c) { return c.check.id == id; });
    if (found == cases.end()) found = cases.insert(cases.end(), Case{CheckRun{id, id, 1, {}}, {}});
    found->findings.push_back(&finding);
  }
  return cases;
}

// ---- XML

// Returns an element that lists findings; nothing if there are none.
std::string xml_element(const char* name, const char* attributes, const std::vector<const Finding*>& findings) {
  if (findings.empty()) return {};
  std::string out = std::string("    <") + name;
  if (*attributes != '\0') {
    const std::string more = findings.size() > 1 ? " (and " + with_commas(std::ssize(findings) - 1) + " more)" : "";
    out += std::string(" ") + attributes + " message=\"" + markup_escaped(headline(*findings[0]) + more) + "\"";
  }
  out += ">";
  for (const Finding* f : findings) {
    out += markup_escaped(std::string(severity_name(f->severity)) + ": " + headline(*f)) + "\n";
    for (const std::string& line : details(*f)) out += "  " + markup_escaped(line) + "\n";
  }
  return out + "</" + name + ">\n";
}

bool has_failed(const Case& c, Severity threshold) {
  return std::any_of(c.findings.begin(), c.findings.end(), [&](const Finding* f) { return fails(*f, threshold); });
}

std::string xml_case(const Case& c, Severity threshold) {
  std::vector<const Finding*> failures, output;
  for (const Finding* f : c.findings) (fails(*f, threshold) ? failures : output).push_back(f);
  std::string out = "  <testcase classname=\"" + markup_escaped(c.check.id) + "\" name=\"" +
                    markup_escaped(c.check.title) + "\" assertions=\"" + std::to_string(c.check.looked_at) + "\">\n";
  if (!c.check.skipped.empty()) out += "    <skipped message=\"" + markup_escaped(c.check.skipped) + "\"/>\n";
  const std::string type = failures.empty() ? "" : "type=\"" + std::string(severity_name(failures[0]->severity)) + "\"";
  out += xml_element("failure", type.c_str(), failures);
  out += xml_element("system-out", "", output);
  return out + "  </testcase>\n";
}

}  // namespace

void FindingsOptions::add(CommandLine& line) {
  line.group("Report");
  line.add_flag("--json", json, "Print the result as JSON").common();
  add_html_option(line, html);
  line.add_option("--junit", junit, "Write the result as JUnit XML to FILE").written(kJunitReport);
  line.add_option("--fail-on", fail_on, "Exit with 1 if a finding has at least this severity")
      .takes("SEVERITY")
      .suggests({"error", "warning", "note"})
      .shows_default();
}

Result<Severity> FindingsOptions::threshold() const {
  for (const Severity s : kSeverities)
    if (severity_name(s) == fail_on) return s;
  return unknown_word("severity", fail_on, {"error", "warning", "note"});
}

void print_findings(const AuditReport& report, std::size_t shown) {
  const std::vector<Finding> findings = errors_first(report.findings);
  const std::size_t n = std::min(shown, findings.size());
  const std::string indent(kSeverityWidth, ' ');
  for (std::size_t i = 0; i < n; ++i) {
    const std::string label = padded(std::string(severity_name(findings[i].severity)), kSeverityWidth);
    std::printf("%s%s\n", colored(label, color_of(findings[i].severity)).c_str(),
                in_column(headline(findings[i]), kSeverityWidth).c_str());
    for (const std::string& line : details(findings[i]))
      std::printf("%s%s\n", indent.c_str(), in_column(line, kSeverityWidth).c_str());
  }
  if (n < findings.size())
    print_row("...", "and " + counts_text({findings.begin() + n, findings.end()}) + " more (--json has all)");
}

void print_summary(const AuditReport& report) {
  std::printf("%s   %s in %s%s\n", counts_text(report.findings).c_str(), printable(report.looked_at).c_str(),
              elapsed_text(report.seconds).c_str(), report.how.empty() ? "" : (", " + report.how).c_str());
}

void add_findings(Json& object, const AuditReport& report, Severity threshold) {
  const auto rows_json = [](const std::vector<RowsPart>& parts) {
    Json out = Json::array();
    for (const RowsPart& p : parts) out.push_back(Json::object().set("what", p.what).set("rows", p.rows));
    return out;
  };
  Json findings = Json::array();
  for (const Finding& f : errors_first(report.findings))
    findings.push_back(Json::object()
                           .set("severity", severity_name(f.severity))
                           .set("id", f.id)
                           .set("tensors", texts_json(f.tensors))
                           .set("what", f.what)
                           .set("why", texts_json(f.why))
                           .set("rows", rows_json(f.rows))
                           .set("lost", f.lost)
                           .set("advice", f.advice));
  Json checks = Json::array();
  for (const Case& c : cases_of(report)) {
    Json check = Json::object();
    check.set("id", c.check.id).set("title", c.check.title).set("looked_at", c.check.looked_at);
    check.set("findings", c.findings.size());
    check.set("skipped", c.check.skipped.empty() ? Json() : Json(c.check.skipped));
    checks.push_back(std::move(check));
  }
  object.set("ok", exit_code(report.findings, threshold) == 0).set("findings", std::move(findings));
  object.set("checks", std::move(checks)).set("seconds", report.seconds);
}

std::string junit_text(const AuditReport& report, Severity threshold) {
  const std::vector<Case> cases = cases_of(report);
  const auto failed =
      std::count_if(cases.begin(), cases.end(), [&](const Case& c) { return has_failed(c, threshold); });
  const auto skipped =
      std::count_if(cases.begin(), cases.end(), [](const Case& c) { return !c.check.skipped.empty(); });
  char time[32];
  std::snprintf(time, sizeof time, "%.3f", report.seconds);
  const std::string totals = "tests=\"" + std::to_string(cases.size()) + "\" failures=\"" + std::to_string(failed) +
                             "\" errors=\"0\" skipped=\"" + std::to_string(skipped) + "\" time=\"" + time + "\"";
  std::string out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites " + totals + ">\n<testsuite name=\"" +
                    markup_escaped(report.title) + "\" " + totals + ">\n";
  for (const Case& c : cases) out += xml_case(c, threshold);
  return out + "</testsuite>\n</testsuites>\n";
}

Result<int> conclude(const AuditReport& report, const FindingsOptions& options) {
  const Severity threshold = TRY(options.threshold());
  if (!options.junit.empty() && leads())
    TRY(replace_report(options.junit, kJunitReport, junit_text(report, threshold)));
  return exit_code(report.findings, threshold);
}

}  // namespace reshard::tools
