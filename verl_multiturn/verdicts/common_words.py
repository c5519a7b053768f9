"""Common English words, from which texts are drawn that have to look like others."""

from __future__ import annotations

_TEXT = """
a i an as at be by do go he if in is it me my no of on or so to up us we abc act add age all and any are art ask bad
bag bar baz bed big bit box boy bus but buy can car cat col cup cut day did dog dry ear eat egg end eye far few fix
fly foo for fun get got hat her him his hit hot how ice its job joy key kid law lay leg let lie log lot low man map
max may men min mix net new nor not now off oil old one our out own pan pay pen pet pie pin put ran raw red rid row
run sad say sea see set she sit six sky son sum sun ten the tie tip too top toy try two use war was way wet who why
win xyz yes yet you able also area army away baby back ball band bank base bear beat been best bill bird blue boat
body bold bone book born both bowl call came card care case cash cell city club coal coat code cold come cook cool
copy corn cost crew dark data date dead deal dear deep desk dish does done door down draw dust duty each earn east
easy edge else even ever face fact fail fair fall farm fast fear feel file fill film find fine fire firm fish five
flat flow food foot form four free from full game gave gift girl give glad goal gold good gray grow hair half hall
hand hard have head hear heat help here hero hide high hill hold home hope hour huge idea into iron item join jump
just keep kind king know lack lady lake land last late lead left less life lift like line link list live load long
look lost loud love luck main make many mark mass meal mean meet milk mind mine miss mode moon more most move much
must name near neck need news next nice nine node none note only open over page pain pair park part pass past path
pick plan play plus pool poor post pull pure push race rain read real rest rice rich ride ring rise road rock role
roof room root rope rule safe said sale salt same sand save seat seed seek seem sell send ship shop show side sign
silk size skin slow snow soft soil some song soon sort soul spot star stay step stop such suit sure swim tail take
talk tall task team tell term test text than that them then they thin this time tiny told tone tool town tree trip
true turn type unit upon used user vary vast very view vote wait walk wall want warm wash wave weak wear week well
went were west what when whom wide wife wild will wind wine wing wise wish with wood word work yard year zero zone
about above actor admit after again agree alarm alive alone along among anger apple array began begin being below
black blank blind block blood board brain bread break brick brief bring broad brown build carry catch cause chain
chair cheap check chief child claim class clean clear clock close cloud coast count court cover crowd dance death
delta doubt dozen draft dream dress drink drive eager early earth eight empty enemy enjoy enter equal error event
every exact exist extra false fault field fifth fight final first floor focus force forth found frame fresh front
fruit glass grand grass great green group guess guide happy heart heavy hello horse hotel house human image index
inner input issue judge juice known label large later laugh layer learn least leave level light limit local loose
lower lucky lunch magic major march match maybe metal might minor model money month motor mouse mouth movie music
never night noise north novel nurse ocean offer often order other outer owner paint panel paper party peace phone
photo piece place plain plane plant plate point pound power press price pride prime prize proof queen query quick
quiet quite radio raise range rapid ratio reach ready right river rough round route scale scene scope score sense
serve seven shape share sharp sheet shift shirt short sight skill sleep small smart smile smoke solid solve sorry
sound south space spare speak speed spend split sport staff stage start state steel stick still stock stone store
storm story style sugar table taste teach thank their theme there thick thing think third three throw tight title
today token topic total touch tower track trade train treat trend trial tribe truck trust truth twice uncle under
union until upper urban usage usual valid value video visit voice waste watch water wheel where which while white
whole woman world worth would write wrong yield young accept action active actual advice affect afford agency animal
answer anyone appear around arrive artist attack august author autumn banana battle beauty become before behind
belief belong better beyond bottom branch breath bridge bright broken budget button camera cancel cannot carbon
castle center chance change charge choice choose church circle client coffee column common corner cotton county
couple course create credit custom damage danger debate decide defeat define degree demand depend desert design
desire detail device dinner direct doctor dollar double driver during editor effect effort eleven empire enable
energy engine enough entire entity escape estate ethnic except expect expert export extend family famous father
figure filter finger finish flight flower follow forest forget formal format former france friend future garden
gather gentle global ground growth guilty handle happen health height hidden hungry ignore impact import income
indeed inform injury insert inside invest island itself junior kernel killed ladder latest launch lawyer leader
league length lesson letter listen little living losing manage manner market master matter medium member memory
mental merely method middle minute mirror mobile modern moment mother motion murder museum nation native nature
nearby nearly needed nobody normal notice number object obtain office online option orange origin output parent
people period permit person phrase planet player please plenty poetry police policy prefer pretty prince prison
profit proper public purple pursue random rarely rather reader really reason recall recent record reduce region
relate remain remote remove repair repeat report rescue result return review reward riding rising salary sample
saving scheme school screen script search season second secret sector select senior series server settle severe
shadow should silent silver simple single sister smooth soccer social source spirit spread spring square stable
status steady stream street strike string strong studio submit sudden summer supply survey switch symbol system
target temple thanks theory thirty though threat ticket toward travel triple twelve twenty unable unique united
update useful valley vector vendor victim visual volume wealth weapon weekly weight window winner winter within
wonder worker writer yellow absence account achieve address advance against airport already analyst ancient another
anxiety applied arrange article attempt average balance banking because bedroom believe beneath benefit besides
between brother builder cabinet capable capital captain caption careful century certain chapter charity chicken
circuit citizen classic climate closing collect college combine comfort command comment company compare compete
complex concept concern conduct confirm connect content context control convert correct council counter country
courage covered created culture current decided declare default defense deliver density deposit develop display
distant diverse drawing driving dynamic eastern economy edition element english evening evident examine example
excited expense explain explore express extreme factory failure feature federal feeling fiction finance finding
foreign forever formula fortune forward freedom general genetic genuine getting gradual graphic greater growing
habitat healthy heavily helpful history holiday hundred husband imagine improve include initial inquiry install
instead integer involve journal journey justice kitchen landing largest learner leather library limited logical
machine manager massive maximum meaning measure medical meeting mention message million minimum missing mission
mistake mixture monitor morning natural neither network nothing nuclear observe obvious offense officer opening
operate opinion organic outcome outside overall package painful partner passage patient pattern payment percent
perfect perhaps physics picture plastic popular portion poverty predict prepare present prevent primary printer
private problem proceed process produce product profile program project promise protect protest provide publish
purpose quality quarter quickly reading reality receive recover reflect regular release replace request require
resolve respect respond restore retired revenue reverse routine running science section segment serious service
session setting several shelter similar sixteen society soldier speaker special species station storage strange
stretch student subject succeed success suggest summary support suppose surface surgery survive teacher theater
therapy thought through tonight totally tourist traffic trouble turning typical unknown unusual upgrade usually
variety various vehicle version veteran victory village violent visible warning weather wedding weekend welcome
western whether whisper without witness working writing academic accident accurate activity actually addition
adequate advanced announce anything approach approval argument attitude audience balanced bathroom birthday boundary
building business calendar campaign capacity category chemical children clothing complete computer conclude congress
consider constant consumer continue contract contrast creation creative criminal critical customer database daughter
decision decrease delivery describe designer detailed dialogue directly director disagree discount discover disorder
distance distinct district division document domestic dominant dramatic duration electric elephant emphasis employee
engineer enormous entirely envelope estimate evaluate everyday everyone evidence exchange exercise expected external
familiar favorite feedback festival football function generate graphics greatest guidance hardware heritage hospital
identify identity incident increase indicate industry informal instance interest internal internet invasion keyboard
language learning lifetime likewise location magazine majority marriage material medicine moderate moreover movement
multiple national negative neighbor northern notebook numerous observer occasion official operator opposite ordinary
organize original overcome painting parallel particle password personal physical planning platform pleasure politics
position positive possible powerful practice presence preserve pressure previous princess probably producer progress
properly property proposal prospect protocol province purchase quantity question reaction recently recovery regional
register relation relative relevant religion remember republic research resident resource response sandwich schedule
scrutiny security sentence separate sequence shoulder slightly software solution somebody southern speaking specific
spectrum standard strategy strength striking struggle suitable sunlight surprise surround survival symbolic sympathy
takeover teaching template thinking thousand together tomorrow training transfer treasure treaties triangle tropical
ultimate umbrella universe unlikely valuable variable vertical vitamins volatile weakness whenever wherever wireless
yourself
"""
COMMON_WORDS = frozenset(_TEXT.split())
"""Words of one to eight letters."""
